"""A symmetric heap between the CPU ranks of one host: one shared memory segment per allocation.

Segments have no name once all ranks have mapped them (see segment.py). Flags are polled, since their writers may be
anything that stores, e.g. a Triton kernel in the interpreter.
"""

import time

import torch
from torch import Tensor

from megalite import native
from megalite.comm.heap_layout import Piece, SymmetricBuffer, buffer_from_blocks
from megalite.comm.segment import share, shared_memory_missing
from megalite.mesh import Group

ARRIVED = 0
"""The flag column of the barrier."""


def shm_missing(device: torch.device) -> str | None:
    """Why a heap in shared memory is not possible here, or None."""
    if device.type != "cpu":
        return f"shared memory is for CPU ranks, this one is on {device.type}"
    return shared_memory_missing()


class ShmHeap:
    """One rank's end of the heap of a group."""

    def __init__(self, group: Group, *, device: torch.device, timeout_s: float):
        self.rank = group.rank
        self.size = group.size
        self.device = device
        self._group = group
        self._timeout_s = timeout_s
        self._arrivals = self.allocate((0,), torch.uint8)

    def allocate(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, num_buffers: int = 2, num_flags: int = 64
    ) -> SymmetricBuffer:
        """See symmetric.Heap.

        Raises:
            SegmentError: no space in /dev/shm on one of the ranks.
        """
        piece = Piece(tuple(shape), dtype, num_buffers, num_flags, self.size)
        return buffer_from_blocks(piece, list(self._memory(piece).view(self.size, -1)), self.rank)

    def _memory(self, piece: Piece) -> Tensor:
        ranks, num_bytes = self._group.ranks, self.size * piece.num_bytes
        if self.size == 1:
            return torch.zeros(num_bytes, dtype=torch.uint8)
        return share({ranks: num_bytes}, rank=ranks[self.rank], pg=self._group.pg)[ranks]

    def barrier(self) -> None:
        """See symmetric.Heap."""
        lib, buffer, limit = native.load(), self._arrivals, time.monotonic() + self._timeout_s
        buffer.epoch.add_(1)
        epoch = int(buffer.epoch)
        for flags in buffer.peer_flags:
            lib.flag_store(flags[self.rank, ARRIVED].data_ptr(), epoch)
        late = [
            self._group.ranks[source]
            for source in range(self.size)
            if not lib.flag_wait(buffer.flags[source, ARRIVED].data_ptr(), epoch, max(0.0, limit - time.monotonic()))
        ]
        if late:
            raise RuntimeError(
                f"ranks {', '.join(map(str, late))} did not come to a barrier of the {self._group.axis} heap within "
                f"{self._timeout_s:g} s"
            )

    def close(self) -> None:
        """See symmetric.Heap: the memory goes with the last tensor that views it."""
