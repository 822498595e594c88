"""What the tests of the C++ layer kernels share: which function ran and how, guarded results, rows between NaN,
tensors that end at a page which can't be read."""

import ctypes
import faulthandler
import math
import mmap
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megalite import native

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
GUARD = 40
"""Elements of NaN before and behind each result."""
GRAIN = 1 << 17
"""Elements below which the kernels start no second thread."""


class Calls:
    """Stands in for the extension, lists the names of its functions that were called, and adds arguments to them."""

    def __init__(self, monkeypatch, **arguments):
        self.names: list[str] = []
        self.arguments = arguments
        self.module = native.load()
        if self.module is None:
            pytest.skip(f"not built: {native.why_missing()}")
        monkeypatch.setattr(native, "load", lambda: self)

    def __getattr__(self, name):
        function = getattr(self.module, name)

        def call(*arguments, **named):
            self.names.append(name)
            return function(*arguments, **named | self.arguments)

        return call


class Guards:
    """While a test runs, torch.empty is poisoned with NaN on all sides and inside."""

    def __init__(self, monkeypatch):
        self.buffers: list[tuple[Tensor, int]] = []
        self.full = torch.full
        monkeypatch.setattr(torch, "empty", self._empty)

    def _empty(self, *shape, dtype=torch.float32, **_):
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        num = math.prod(sizes)
        buffer = self.full((num + 2 * GUARD,), math.nan, dtype=dtype)
        self.buffers.append((buffer, num))
        return buffer[GUARD : GUARD + num].view(sizes)

    def check(self) -> int:
        """Assert that results were written whole and nothing around them; returns how many there were."""
        for buffer, num in self.buffers:
            assert not buffer[GUARD : GUARD + num].isnan().any(), "an element was not written"
            assert buffer[:GUARD].isnan().all(), "written before the result"
            assert buffer[GUARD + num :].isnan().all(), "written behind the result"
        return len(self.buffers)


def between_nan(x: Tensor) -> Tensor:
    """The same values, each row of the last dim (and each slice of the others) with NaN around it."""
    wide = torch.full([size + 2 for size in x.shape], math.nan, dtype=x.dtype)
    inner = wide[tuple(slice(1, -1) for _ in x.shape)]
    return inner.copy_(x.detach())


def randn(*shape, dtype=torch.float32, seed=0):
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def at_page_end(x: Tensor, kept: list[mmap.mmap]) -> Tensor:
    """The same values, ending where a page begins that must not be touched; `kept` keeps the memory alive."""
    pages = -(-x.nbytes // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    kept.append(memory)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + pages * mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
    offset = pages * mmap.PAGESIZE - x.nbytes
    return torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=offset).view(x.shape).copy_(x)


def exit_status(work: Callable[[], None]) -> int:
    """How a forked child ends that does `work`: 0, 1 for an exception, minus the signal that killed it."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()  # a death that is wanted needs no report
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
