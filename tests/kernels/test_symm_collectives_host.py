"""The symmetric collectives' CUDA sources on host threads: right to the bit on every rank, no race, no hang.

All ranks run in one process under ThreadSanitizer, with random delays, blocks that are all resident, epochs that wrap,
and messages of many pieces. Each planted fault must be reported or give a wrong result, or the gate is worthless.
"""

import subprocess
from pathlib import Path

import pytest
import torch

from tests.kernels import symm_host
from tests.kernels.symm_host import FAULTS, FORMATS, OPS, barrier_lines, build, expected, make_inputs

pytestmark = [pytest.mark.skipif(symm_host.COMPILER is None, reason="needs g++"), pytest.mark.timeout(120)]
WRAP = 2**32 - 3
RACE = 66
JITTER_US = 300
LATE = 4  # the driver's exit code when a wait ran into its limit


@pytest.fixture(scope="module")
def raced(tmp_path_factory):
    """The build that reports races."""
    return build(tmp_path_factory.mktemp("symm") / "raced", "-fsanitize=thread")


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """The same with faults that can be switched on."""
    folder = tmp_path_factory.mktemp("symm_faults")
    return build(folder / "faulty", "-fsanitize=thread", csrc=symm_host.with_faults(folder))


def run(binary: Path, folder: Path, op: str, x: torch.Tensor, *, offset=0, epoch=0, fault="", line=0):
    """One run of all ranks; the finished process and the outputs (calls, ranks, elements)."""
    calls, ranks, wide = x.shape
    (folder / "in").write_bytes(x.contiguous().view(torch.uint8).numpy().tobytes())
    num = wide // ranks if op == "scatter" else wide
    numbers = [OPS.index(op), ranks, FORMATS[x.dtype], num, offset, calls, epoch, JITTER_US]
    words = [line, FAULTS.index(fault), *numbers, folder]
    done = subprocess.run(
        [str(binary), *map(str, words)],
        env={"TSAN_OPTIONS": f"exitcode={RACE}:halt_on_error=1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    out = folder / "out"
    raw = torch.frombuffer(bytearray(out.read_bytes()), dtype=x.dtype) if out.exists() else torch.empty(0)
    return done, raw.reshape(calls, ranks, -1)


def assert_bits(found: torch.Tensor, right: torch.Tensor) -> None:
    assert found.shape == right.shape
    assert torch.equal(found.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


CASES = [
    ("one_shot", 2, torch.bfloat16, 1, 0),
    ("one_shot", 3, torch.float32, 700, 0),
    ("two_shot", 2, torch.float32, 1030, 0),
    ("two_shot", 3, torch.bfloat16, 2051, 1),
    ("two_shot", 4, torch.float16, 9, 0),
    ("multimem", 3, torch.bfloat16, 1500, 0),
    ("multimem", 2, torch.float32, 333, 1),
    ("gather", 3, torch.float32, 301, 0),
    ("gather", 2, torch.bfloat16, 1024, 0),
    ("scatter", 3, torch.bfloat16, 517, 0),
    ("scatter", 2, torch.float32, 400, 1),
    ("broadcast", 3, torch.float16, 1601, 0),
]


@pytest.mark.parametrize(("op", "ranks", "dtype", "num", "offset"), CASES)
def test_bits_and_races(raced, tmp_path, op, ranks, dtype, num, offset):
    x = make_inputs(op, ranks=ranks, num=num, calls=6, dtype=dtype)
    done, out = run(raced, tmp_path, op, x, offset=offset, epoch=WRAP)
    assert done.returncode == 0, done.stderr
    assert_bits(out, expected(op, x))


def test_one_shot_and_two_shot_agree_to_the_bit(raced, tmp_path):
    x = make_inputs("one_shot", ranks=3, num=515, calls=1, dtype=torch.float32)
    found = [run(raced, tmp_path, op, x)[1] for op in ("one_shot", "two_shot")]
    assert_bits(*found)


@pytest.mark.parametrize("op", ["one_shot", "two_shot", "gather", "scatter", "broadcast", "multimem"])
@pytest.mark.parametrize("line", barrier_lines())
def test_each_barrier_left_out_is_a_reported_race(raced, tmp_path, op, line):
    x = make_inputs(op, ranks=2, num=512, calls=6, dtype=torch.float32)
    done, _ = run(raced, tmp_path, op, x, line=line)
    assert done.returncode == RACE
    assert "data race" in done.stderr


@pytest.mark.parametrize("fault", ["relaxed release", "relaxed acquire"])
@pytest.mark.parametrize("op", ["one_shot", "two_shot", "multimem"])
def test_a_weaker_flag_is_a_reported_race(raced, tmp_path, op, fault):
    x = make_inputs(op, ranks=2, num=512, calls=6, dtype=torch.float32)
    done, _ = run(raced, tmp_path, op, x, fault=fault)
    assert done.returncode == RACE
    assert "data race" in done.stderr


@pytest.mark.parametrize("fault", ["skipped wait", "one buffer"])
@pytest.mark.parametrize("op", ["one_shot", "two_shot", "gather", "scatter"])
def test_a_shorter_protocol_is_a_reported_race(faulty, tmp_path, op, fault):
    x = make_inputs(op, ranks=2, num=512, calls=6, dtype=torch.float32)
    done, _ = run(faulty, tmp_path, op, x, fault=fault)
    assert done.returncode == RACE
    assert "data race" in done.stderr


def test_an_unsigned_comparison_fails_at_the_wrap(faulty, tmp_path):
    x = make_inputs("one_shot", ranks=2, num=512, calls=6, dtype=torch.float32)
    done, _ = run(faulty, tmp_path, "one_shot", x, fault="unsigned compare", epoch=WRAP)
    assert done.returncode in (RACE, LATE)
    done, out = run(faulty, tmp_path, "one_shot", x, fault="unsigned compare")  # that it was the wrap
    assert done.returncode == 0, done.stderr
    assert_bits(out, expected("one_shot", x))
