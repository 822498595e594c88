"""The symmetric collectives' CUDA sources built for the host, and what their results must be to the bit."""

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.comm.symmetric import shm_missing

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
HOST = ROOT / "tests" / "cuda_host"
SOURCES = ("symm_all_reduce.cu", "symm_barrier.cu", "symm_gather.cu", "symm_multimem.cu", "symm_scatter.cu")
COMPILER = shutil.which("g++")
_NO_HEAP = shm_missing(torch.device("cpu"))
ON_A_HEAP = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.skipif(_NO_HEAP is not None, reason=f"no heap: {_NO_HEAP}"),
    pytest.mark.timeout(120),
]
"""Marks of tests whose CPU ranks run these sources over a heap in shared memory."""
CHANNELS, THREADS = 2, 32
FLAGS = ["-std=c++20", "-O1", "-g1", "-ffp-contract=off", "-pthread", "-fno-sanitize-recover=all", "-Wall", "-Wextra"]
FLAGS += ["-Wno-unknown-pragmas", "-DMEGALITE_HOST_EMULATOR", f"-DMEGALITE_SYMM_THREADS={THREADS}"]
FLAGS += [f"-DMEGALITE_CHANNELS={CHANNELS}"]
OPS = ("one_shot", "two_shot", "multimem", "gather", "scatter", "broadcast", "barrier")
"""In the order of the driver's numbers."""
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FAULTS = ("", "relaxed release", "relaxed acquire", "skipped wait", "one buffer", "unsigned compare")
"""In the order of ptx_host.h; the last three need the sources of `with_faults`."""
FAULTY = {
    "exchange.cuh": {
        "late = !wait(peer);": "late = emulator::fault != emulator::kSkippedWait && !wait(peer);",
        "static_cast<int32_t>(got - epoch_) >= 0": "(emulator::fault == emulator::kUnsignedCompare ? got >= epoch_ : "
        "static_cast<int32_t>(got - epoch_) >= 0)",
        "(epoch_ + ahead) % 2": "(epoch_ + ahead) % (emulator::fault == emulator::kOneBuffer ? 1 : 2)",
    },
}
"""Header -> what is replaced in it, everywhere it stands."""


def build(out: Path, *flags: str, csrc: Path = CSRC) -> Path:
    """Compile the driver with the .cu files of `csrc`."""
    includes = [f"-I{include}" for include in (csrc, csrc / "include", HOST)]
    command = [COMPILER, *FLAGS, *flags, *includes, str(HOST / "symm_main.cpp"), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return out


@cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="symm_host_")


@cache
def library() -> Path:
    """The driver as a library, built once for all tests of a process and removed with it."""
    return build(Path(_folder().name) / "symm.so", "-shared", "-fPIC")


def with_faults(folder: Path) -> Path:
    """A copy of the sources in which `emulator::fault` can take steps of the protocol away."""
    csrc = folder / "csrc"
    shutil.copytree(CSRC, csrc)
    for header, changes in FAULTY.items():
        path = csrc / "include" / header
        text = path.read_text()
        for right, wrong in changes.items():
            assert right in text, f"{header} no longer has {right}"
            text = text.replace(right, wrong)
        path.write_text(text)
    return csrc


def barrier_lines() -> list[int]:
    """Lines of the barriers that order memory: one before the flags, one behind the wait."""
    lines = (CSRC / "include" / "exchange.cuh").read_text().splitlines()
    inside = next(i for i, line in enumerate(lines) if "bool meet()" in line)
    return [i + 1 for i, line in enumerate(lines[inside : inside + 12], inside) if "__syncthreads" in line]


def make_inputs(op: str, *, ranks: int, num: int, calls: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """(calls, ranks, elements of a rank's input), different in every call."""
    wide = num * ranks if op == "scatter" else num
    generator = torch.Generator().manual_seed(seed + 1000 * ranks + num)
    return torch.randn(calls, ranks, wide, generator=generator).to(dtype)


def rank_order_sum(x: Tensor) -> Tensor:
    """(calls, ranks, n) -> (calls, n): added one rank after the other in fp32, rounded once."""
    total = x[:, 0].float()
    for rank in range(1, x.shape[1]):
        total = total + x[:, rank].float()
    return total.to(x.dtype)


def expected(op: str, x: Tensor) -> Tensor:
    """(calls, ranks, elements of a rank's output)."""
    calls, ranks, wide = x.shape
    if op == "gather":
        return x.reshape(calls, 1, -1).expand(calls, ranks, ranks * wide)
    if op == "scatter":
        return rank_order_sum(x).reshape(calls, ranks, wide // ranks)
    if op == "broadcast":
        return torch.stack([x[call, call % ranks].expand(ranks, wide) for call in range(calls)])
    return rank_order_sum(x).unsqueeze(1).expand(calls, ranks, wide)


class HostKernels:
    """The extension's functions for symmetric collectives, from the driver built as a library."""

    def __init__(self, library: Path, *, jitter_us: int = 0):
        self._lib = ctypes.CDLL(str(library))
        self._lib.symm_set_up(jitter_us)
        self._lib.symm_new_team.restype = ctypes.c_void_p
        self.SYMM_FLAG_COLUMNS = self._lib.symm_flag_columns()

    def symm_team(self, *, rank, row_flags, buffer_bytes, timeout_s, error, buffers, multicast, flags) -> Any:
        """The address of a team."""
        tables = [(ctypes.c_int64 * len(table))(*table) for table in (buffers, multicast, flags)]
        numbers = (ctypes.c_int64(buffer_bytes), ctypes.c_double(timeout_s), ctypes.c_int64(error))
        return self._lib.symm_new_team(rank, len(flags), row_flags, *numbers, *tables)

    def _call(self, op: str, team: int, x: int, out: int, num: int, form: int, argument: int = 0) -> None:
        pointers = (ctypes.c_void_p(team), ctypes.c_void_p(x), ctypes.c_void_p(out))
        error = self._lib.symm_call(OPS.index(op), *pointers, ctypes.c_int64(num), form, argument)
        if error:
            raise RuntimeError(f"CUDA: error {error}")

    def symm_all_reduce(self, team, kind, x, out, num, form, reduction, stream) -> None:
        """As the extension's."""
        self._call(kind, team, x, out, num, form, reduction)

    def symm_all_gather(self, team, shard, out, num, form, stream) -> None:
        """As the extension's."""
        self._call("gather", team, shard, out, num, form)

    def symm_reduce_scatter(self, team, full, out, num, form, stream) -> None:
        """As the extension's."""
        self._call("scatter", team, full, out, num, form)

    def symm_broadcast(self, team, data, num, root, form, stream) -> None:
        """As the extension's."""
        self._call("broadcast", team, 0, data, num, form, root)

    def symm_barrier(self, team, stream) -> None:
        """As the extension's."""
        self._call("barrier", team, 0, 0, 0, 0)
