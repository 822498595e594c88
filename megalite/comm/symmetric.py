"""The symmetric heap: tensors that every rank of a group has alike and that all ranks of the group can address.

What kernels that send and compute at once work on: a table of addresses, flags and an epoch per buffer. Three backends:
`torch` (NVLink, see heap_torch.py), `shm` (CPU ranks of one host, heap_shm.py) and `virtual` (several ranks in one
process, heap_virtual.py). Invariant: a flag has one writer; it holds the number of the last call (1, 2, ...; int32,
wraps, compared as a signed difference) that its writer has got so far with, and is never reset.
"""

from typing import Literal, Protocol

import torch

from megalite.comm.heap_layout import Piece, SymmetricBuffer
from megalite.comm.heap_shm import ShmHeap, shm_missing
from megalite.comm.heap_torch import TorchHeap, symmetric_missing
from megalite.comm.heap_virtual import virtual_heaps
from megalite.mesh import Group

__all__ = ["Heap", "Piece", "SymmetricBuffer", "open_heap", "shm_missing", "symmetric_missing", "virtual_heaps"]

Backend = Literal["auto", "torch", "shm"]


class Heap(Protocol):
    """One rank's end of a group's heap."""

    rank: int
    size: int
    device: torch.device

    def allocate(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, num_buffers: int = 2, num_flags: int = 64
    ) -> SymmetricBuffer:
        """Zeroed buffers and flags; collective, in the same order and with the same arguments on all ranks.

        Memory: num_buffers * the tensor's bytes per rank, until the heap and all tensors of it are gone.
        """

    def barrier(self) -> None:
        """Return when all ranks have called it.

        Raises:
            RuntimeError: a rank did not come within the heap's time limit.
        """

    def close(self) -> None:
        """Forget the buffers; call it after the last use on every rank."""


def open_heap(group: Group, *, backend: Backend = "auto", device: torch.device, timeout_s: float) -> Heap:
    """The heap of a group of at least one rank; collective over the group.

    Args:
        backend:   auto is torch on a GPU and shm on the CPU.
        timeout_s: limit of every wait in it.

    Raises:
        ValueError: the backend can't be used here, with the reason.
    """
    if backend == "auto":
        backend = "shm" if device.type == "cpu" else "torch"
    missing = shm_missing(device) if backend == "shm" else symmetric_missing(device)
    if missing:
        raise ValueError(f"a symmetric heap of kind {backend} on {device.type} is not possible: {missing}")
    opened = ShmHeap if backend == "shm" else TorchHeap
    return opened(group, device=device, timeout_s=timeout_s)
