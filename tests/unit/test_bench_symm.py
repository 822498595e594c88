"""tools/bench_symm.py with the CUDA sources built for the host: every line runs, and a wrong result is reported."""

import sys
from pathlib import Path

import pytest
import torch

from tests.kernels import symm_host
from tests.kernels.symm_host import HostKernels

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
bench_symm = __import__("bench_symm")
sys.path.remove(str(ROOT / "tools"))
CPU = torch.device("cpu")
pytestmark = [pytest.mark.skipif(symm_host.COMPILER is None, reason="needs g++"), pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def kernels():
    """The host build."""
    return HostKernels(symm_host.library())


def test_all_of_it(kernels, capsys):
    rows = bench_symm.run(CPU, tiny=True, rounds=1, kernels=kernels)
    assert capsys.readouterr().out.count("are right to the bit") == 2
    assert {(row.op, row.ranks) for row in rows} == {(op, size) for op in bench_symm.OPS for size in (2, 4)}
    assert all(row.time_us > 0 and row.of_copy > 0 for row in rows)
    assert len(bench_symm.table(rows).splitlines()) == 1 + len(rows)


def test_a_wrong_bit_is_seen(kernels):
    ranks = bench_symm.Ranks(2, CPU, buffer_bytes=1024, kernels=kernels)
    right = bench_symm.expected
    try:
        bench_symm.expected = lambda op, inputs: right(op, inputs.flip(1))
        with pytest.raises(AssertionError, match="two_shot, 2 ranks, torch.float32, 64 elements: .* bytes differ"):
            bench_symm.check(ranks, "two_shot", 64, torch.float32)
    finally:
        bench_symm.expected = right
