"""A symmetric heap of several ranks in one process: for one GPU, or the interpreter with a thread per rank.

The ranks' blocks are ordinary tensors of one device. Allocation i of every rank is the same set of blocks, whoever asks
first.
"""

import threading

import torch
from torch import Tensor

from megalite.comm.heap_layout import Piece, SymmetricBuffer, buffer_from_blocks

BARRIER_LIMIT_S = 60.0


class _Shared:
    """What the ranks of one heap have in common."""

    def __init__(self, size: int, device: torch.device):
        self.size = size
        self.device = device
        self.lock = threading.Lock()
        self.barrier = threading.Barrier(size)
        self.allocations: list[tuple[Piece, list[Tensor]]] = []

    def blocks(self, index: int, piece: Piece) -> list[Tensor]:
        """The blocks of allocation `index`, made by the first rank that asks."""
        with self.lock:
            if index == len(self.allocations):
                made = [torch.zeros(piece.num_bytes, dtype=torch.uint8, device=self.device) for _ in range(self.size)]
                self.allocations.append((piece, made))
            known, blocks = self.allocations[index]
        if known != piece:
            raise ValueError(
                f"allocation {index} of the heap is {known} on another rank, {piece} here; make them alike"
            )
        return blocks


class VirtualHeap:
    """One virtual rank's end; made by `virtual_heaps`."""

    def __init__(self, shared: _Shared, rank: int):
        self.rank = rank
        self.size = shared.size
        self.device = shared.device
        self._shared = shared
        self._num_allocated = 0

    def allocate(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, num_buffers: int = 2, num_flags: int = 64
    ) -> SymmetricBuffer:
        """See symmetric.Heap. Ranks may ask one after the other on one thread."""
        piece = Piece(tuple(shape), dtype, num_buffers, num_flags, self.size)
        blocks = self._shared.blocks(self._num_allocated, piece)
        self._num_allocated += 1
        return buffer_from_blocks(piece, blocks, self.rank)

    def barrier(self) -> None:
        """See symmetric.Heap; for a thread per rank: one thread that drives all ranks has no need of it."""
        try:
            self._shared.barrier.wait(BARRIER_LIMIT_S)
        except threading.BrokenBarrierError:
            raise RuntimeError(
                f"not all {self.size} virtual ranks came to the heap's barrier within {BARRIER_LIMIT_S:g} s"
            ) from None

    def close(self) -> None:
        """See symmetric.Heap."""
        self._shared.allocations.clear()


def virtual_heaps(size: int, *, device: torch.device | str) -> list[VirtualHeap]:
    """One heap end for each of `size` ranks of this process, on one device."""
    shared = _Shared(size, torch.device(device))
    return [VirtualHeap(shared, rank) for rank in range(size)]
