"""A symmetric heap on NVLink through torch.distributed._symmetric_memory; the only file that knows that module.

Nothing there is declared stable, so what is used is looked for, not told from a version: `empty`, `rendezvous`, and the
handle's `get_buffer`. Allocations are made once, in the same order on all ranks, and kept. Flags lie in the allocation
itself: torch's own signal pads are shared by all groups and have changed their place.
"""

import importlib
from dataclasses import replace
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.comm.heap_layout import Piece, SymmetricBuffer, buffer_from_blocks
from megalite.mesh import Group

MODULE = "torch.distributed._symmetric_memory"


def symmetric_missing(device: torch.device, module: ModuleType | None = None) -> str | None:
    """Why torch's symmetric memory can't be used on `device`, or None.

    Args:
        module: stands in for torch's module in tests.
    """
    if device.type != "cuda":
        return f"torch's symmetric memory is for GPUs, this rank is on {device.type}"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    return _missing_names(module or _symm_mem())


def _missing_names(module: ModuleType) -> str | None:
    lacking = [name for name in ("empty", "rendezvous") if not callable(getattr(module, name, None))]
    return f"torch {torch.__version__} has no {MODULE}.{' and .'.join(lacking)}" if lacking else None


def _symm_mem() -> ModuleType:
    return importlib.import_module(MODULE)


class TorchHeap:
    """One rank's end of the heap of a group of GPUs that reach each other's memory."""

    def __init__(self, group: Group, *, device: torch.device, timeout_s: float, module: ModuleType | None = None):
        self.rank = group.rank
        self.size = group.size
        self.device = device
        self._group = group
        self._timeout_s = timeout_s
        self._module = module or _symm_mem()
        self._kept: list[tuple[Tensor, Any]] = []

    def allocate(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, num_buffers: int = 2, num_flags: int = 64
    ) -> SymmetricBuffer:
        """See symmetric.Heap; the memory is kept until the process ends.

        Raises:
            RuntimeError: the GPUs can't reach each other, with torch's words.
        """
        piece = Piece(tuple(shape), dtype, num_buffers, num_flags, self.size)
        own = self._module.empty(piece.num_bytes, dtype=torch.uint8, device=self.device)
        own.zero_()
        if self.size == 1:
            return buffer_from_blocks(piece, [own], 0)
        try:
            handle = self._module.rendezvous(own, self._group.pg)
        except RuntimeError as error:
            raise RuntimeError(f"no symmetric memory over the {self._group.axis} ranks: {error}") from error
        self._kept.append((own, handle))
        blocks = [self._block(handle, r, piece, own) for r in range(self.size)]
        self.barrier()  # no rank may store into memory that its owner has not zeroed yet
        made = buffer_from_blocks(piece, blocks, self.rank)
        return replace(made, multicast=_multicast(handle, piece))

    def _block(self, handle: Any, rank: int, piece: Piece, own: Tensor) -> Tensor:
        if rank == self.rank:
            return own
        # an allocation may lie inside a larger one: `offset` (not in every version) says where
        return handle.get_buffer(rank, (piece.num_bytes,), torch.uint8, getattr(handle, "offset", 0))

    def barrier(self) -> None:
        """See symmetric.Heap; through the group's own process group."""
        if self.size > 1:
            torch.cuda.synchronize(self.device)
            dist.barrier(self._group.pg, async_op=True).wait(timedelta(seconds=self._timeout_s))

    def close(self) -> None:
        """See symmetric.Heap; torch pairs freed memory of different ranks wrongly, so it stays."""


def _multicast(handle: Any, piece: Piece) -> tuple[int, ...]:
    """The buffers' multicast addresses; none where the allocation lies inside a larger one, whose start is not ours."""
    base = getattr(handle, "multicast_ptr", 0)
    if not base or getattr(handle, "offset", 0):
        return ()
    return tuple(base + i * piece.buffer_bytes for i in range(piece.num_buffers))
