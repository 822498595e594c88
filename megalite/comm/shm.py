"""Collectives between CPU ranks of one host through shared memory: the Python side of csrc/shm_channel.cpp.

Invariant: a call ends with the same bits on all ranks, or with a RuntimeError on all of them within the time limit that
names the rank at fault. After a failure every later call fails at once, since ranks would no longer be in step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megalite import native
from megalite.comm.segment import Process

ELEMENTS = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int32: 4,
    torch.int64: 5,
}
"""What can be reduced, with the codes of csrc/include/shm_reduce.h."""
OPS = {"sum": 0, "max": 1, "min": 2}
OK, LATE, DEAD, MISMATCH, FAILED, UNFINISHED = range(6)
"""How a call ended: ShmState of csrc/include/shm_wait.h."""


@dataclass(frozen=True)
class Tuning:
    """Sizes and patience of a channel; the same on all its ranks, but for the patience."""

    slot_bytes: int = 1 << 18
    """Of one of a rank's two buffers: what it shows the others at once."""
    one_shot_max: int = 1 << 16
    """all_reduce: up to these bytes every rank sums everything itself."""
    spins: int = 2000
    """Looks at a flag before the core is given away."""
    yields: int = 20
    """Times that the core is given away before the rank sleeps."""
    timeout_s: float = 600.0
    """Limit of one wait."""
    first_chunk: int = 0
    """Where the counters start; near their wrap in a test."""


class ShmChannel:
    """One rank's end of a group's channel; implements mesh.LocalChannel."""

    def __init__(
        self, segment: Tensor, rank: int, *, ranks: tuple[int, ...], processes: list[Process], tuning: Tuning
    ) -> None:
        """Join the channel; every rank of the group must.

        Args:
            segment:   (segment_bytes(...),) uint8, shared and zero at first.
            rank:      this rank in the group; `ranks` are the group's global ranks.
            processes: who the ranks are, in the order of `ranks`.
        """
        self.ranks = ranks
        self._rank = rank
        self._segment = segment  # the memory lives as long as the channel
        self._timeout_s = tuning.timeout_s
        self._pids = [process.pid for process in processes]
        self._lib = native.load().ShmChannel(
            segment.data_ptr(),
            rank,
            [(process.pid, process.start) for process in processes],
            tuning.slot_bytes,
            tuning.one_shot_max,
            (tuning.spins, tuning.yields, tuning.timeout_s),
            tuning.first_chunk,
        )

    def takes(self, *tensors: Tensor) -> bool:
        """Whether a call with such tensors goes this way."""
        for tensor in tensors:  # no generator: this stands in front of every call
            if tensor.dtype not in ELEMENTS or not tensor.is_cpu or not tensor.is_contiguous():
                return False
        return True

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        """Reduce in place over the group.

        Numerics: in rank order; bf16 and fp16 are accumulated in fp32 and rounded once. max and min hand on NaN.
        """
        numbers = (tensor.data_ptr(), tensor.numel(), ELEMENTS[tensor.dtype], OPS[op])
        self._call(self._lib.all_reduce, numbers, f"all_reduce ({op})", tensor)

    def reduce_scatter(self, out: Tensor, full: Tensor) -> None:
        """Sum the ranks' `full`; rank r gets piece r.

        Numerics: as all_reduce.
        """
        self._call(self._lib.reduce_scatter, self._scatter(out, full), "reduce_scatter", full)

    def begin_reduce_scatter(self, out: Tensor, full: Tensor) -> Callable[[], None]:
        """The first half of reduce_scatter: shows the others what fits, without waiting for them. The second half is
        the call that is returned; until then both tensors are left alone and the channel gets no other call, which
        would fail for all ranks."""
        self._call(self._lib.begin_reduce_scatter, self._scatter(out, full), "reduce_scatter", full)
        return partial(self._finish_reduce_scatter, out, full)

    def _finish_reduce_scatter(self, out: Tensor, full: Tensor) -> None:
        """Its arguments were kept alive so far: the library has their addresses."""
        self._call(self._lib.finish_reduce_scatter, (), "reduce_scatter", full)

    def _scatter(self, out: Tensor, full: Tensor) -> tuple[int, int, int, int]:
        assert full.numel() == out.numel() * len(self.ranks)
        assert full.dtype == out.dtype
        return out.data_ptr(), full.data_ptr(), out.numel(), ELEMENTS[out.dtype]

    def all_gather(self, out: Tensor, shard: Tensor) -> None:
        """Put the ranks' shards into `out`, in rank order."""
        assert out.numel() == shard.numel() * len(self.ranks)
        assert out.dtype == shard.dtype
        numbers = (out.data_ptr(), shard.data_ptr(), shard.nbytes)
        self._call(self._lib.all_gather, numbers, "all_gather", shard)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Copy the tensor of the group's rank `root` to all."""
        numbers = (tensor.data_ptr(), tensor.nbytes, root)
        self._call(self._lib.broadcast, numbers, f"broadcast from rank {self.ranks[root]}", tensor)

    def barrier(self) -> None:
        """Return when all ranks of the group have called it."""
        self._call(self._lib.barrier, (), "barrier", None)

    def _call(
        self, work: Callable[..., tuple[int, list[int]]], numbers: tuple[int, ...], what: str, tensor: Tensor | None
    ) -> None:
        try:
            state, at_fault = work(*numbers)
        except BaseException as error:  # a signal's: the call is lost half-way, for everyone
            text = f"rank {self.ranks[self._rank]} was interrupted ({type(error).__name__}) in "
            self._lib.fail(text + self._described(what, tensor))
            raise
        if state != OK:
            text = self._reason(state, at_fault, self._described(what, tensor))
            if state != FAILED:
                self._lib.fail(text)
            raise RuntimeError(text)

    def _described(self, what: str, tensor: Tensor | None) -> str:
        content = "" if tensor is None else f" of {tensor.numel()} x {str(tensor.dtype).removeprefix('torch.')}"
        return f"{what}{content} over ranks {_listed(self.ranks)}"

    def _reason(self, state: int, at_fault: list[int], what: str) -> str:
        me, others = self.ranks[self._rank], [self.ranks[r] for r in at_fault]
        if state == FAILED:
            return f"rank {me} can't do {what}: the ranks are out of step since: {self._lib.failure()}"
        if state == UNFINISHED:
            return f"rank {me} calls {what} before it has waited for its last reduce_scatter"
        if state == DEAD:
            pids = _listed([self._pids[r] for r in at_fault])
            return f"rank {_listed(others)} died (pid {pids}); rank {me} waited for it in {what}"
        if state == LATE:
            return (
                f"rank {_listed(others)} did not come within {self._timeout_s:g} s (run.timeout_s); rank {me} waited "
                f"in {what}"
            )
        assert state == MISMATCH
        return f"rank {me} calls {what}, but rank {_listed(others)} calls something else there"


def segment_bytes(size: int, tuning: Tuning) -> int:
    """Shared memory of a channel of `size` ranks."""
    return native.load().shm_segment_bytes(size, tuning.slot_bytes)


def _listed(numbers: list[int] | tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
