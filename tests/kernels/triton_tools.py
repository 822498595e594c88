"""What the tests of Triton kernels share: which kernel ran, ranks in one process, rows far apart in memory."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from triton.runtime.interpreter import InterpretedFunction

CPU = torch.device("cpu")
INTERPRETED = (torch.float32, torch.float16)
"""The interpreter's bf16 arithmetic is silently wrong."""
TIMEOUT_S = 120


class Launches:
    """Stands in for kernels of a module and lists the names of those that were launched."""

    def __init__(self, monkeypatch, module, *names):
        self.names: list[str] = []
        for name in names:
            kernel = getattr(module, name)
            assert isinstance(kernel, InterpretedFunction)
            monkeypatch.setattr(module, name, _Kernel(kernel, name, self.names))


class _Kernel:
    def __init__(self, kernel, name, launched):
        self.kernel, self.name, self.launched = kernel, name, launched

    def __getitem__(self, grid):
        self.launched.append(self.name)
        return self.kernel[grid]


def run_slices(num_ranks, work):
    """work(rank, reduce) of every rank in one process; they take turns, since the interpreter is not thread-safe."""
    turn, barrier, slots = threading.Lock(), threading.Barrier(num_ranks, timeout=TIMEOUT_S), {}

    def meet():
        turn.release()
        try:
            barrier.wait()
        finally:
            turn.acquire()

    def reduce_of(rank):
        def reduce(tensor, op):
            slots[rank] = tensor.clone()
            meet()
            stacked = torch.stack([slots[r] for r in range(num_ranks)])
            meet()
            tensor.copy_(stacked.amax(0) if op == "max" else stacked.sum(0))

        return reduce

    def one(rank):
        with turn:
            return work(rank, reduce_of(rank))

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(one, range(num_ranks)))


def far_rows(num_columns, dtype=torch.float16):
    """(3, num_columns) of NaN whose last row starts 2^31 elements after the first; only the rows are touched."""
    rows = torch.empty((1 << 31) + num_columns, dtype=dtype).as_strided((3, num_columns), (1 << 30, 1))
    return rows.fill_(torch.nan)
