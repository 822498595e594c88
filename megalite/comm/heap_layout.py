"""How one allocation of a symmetric heap lies in memory: per rank its buffers, then its flags, all aligned.

Pure arithmetic and views, the same for every backend: a backend only has to provide one block of bytes per rank.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 256
"""Of every buffer, in bytes: any vector load and any cache line."""


@dataclass(frozen=True)
class SymmetricBuffer:
    """One tensor per rank and buffer, the same shape everywhere, addressable by all ranks of the group.

    Call n (0, 1, ...) uses buffer n % num_buffers and flags it with n + 1. `rank` and `size` are the group's.
    """

    rank: int
    size: int
    local: tuple[Tensor, ...]
    """local[i]: this rank's tensor of buffer i."""
    peers: tuple[tuple[Tensor, ...], ...]
    """peers[i][r]: rank r's tensor of buffer i in this process; peers[i][rank] is local[i]."""
    pointers: Tensor
    """(num_buffers, W) int64 on the device: addresses of peers[i][r]."""
    flags: Tensor
    """(W, num_flags) int32: this rank's flags; row s is written by rank s only. Zero at the start."""
    peer_flags: tuple[Tensor, ...]
    """peer_flags[r]: rank r's flags in this process."""
    flag_pointers: Tensor
    """(W,) int64 on the device: addresses of peer_flags[r]."""
    epoch: Tensor
    """(1,) int32 on the device: calls begun so far by this rank."""
    multicast: tuple[int, ...] = ()
    """Address of each buffer in a mapping that stands for all ranks' buffers at once (NVSwitch); empty without one."""


@dataclass(frozen=True)
class Piece:
    """What each rank contributes to one allocation."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    num_buffers: int
    num_flags: int
    size: int

    def __post_init__(self) -> None:
        if self.num_buffers < 2:
            raise ValueError(f"num_buffers={self.num_buffers}: a peer may still read the last one; use at least 2")
        if self.num_flags < 1:
            raise ValueError(f"num_flags={self.num_flags} must be at least 1")

    @property
    def buffer_bytes(self) -> int:
        """From one buffer to the next."""
        return _round_up(math.prod(self.shape) * self.dtype.itemsize, ALIGNMENT)

    @property
    def num_bytes(self) -> int:
        """Of one rank's block."""
        return _round_up(self.num_buffers * self.buffer_bytes + 4 * self.size * self.num_flags, ALIGNMENT)

    def buffer(self, block: Tensor, index: int) -> Tensor:
        """Buffer `index` in a rank's block of bytes."""
        begin = index * self.buffer_bytes
        content = block[begin : begin + math.prod(self.shape) * self.dtype.itemsize]
        return content.view(self.dtype).view(self.shape)

    def flags(self, block: Tensor) -> Tensor:
        """(W, num_flags) int32 in a rank's block; with the default 64 each row, that is each writer, has own lines."""
        begin = self.num_buffers * self.buffer_bytes
        return block[begin : begin + 4 * self.size * self.num_flags].view(torch.int32).view(self.size, self.num_flags)


def buffer_from_blocks(piece: Piece, blocks: Sequence[Tensor], rank: int) -> SymmetricBuffer:
    """The buffer of `rank` over the ranks' blocks of `piece.num_bytes` zeroed bytes each."""
    device = blocks[rank].device
    peers = tuple(tuple(piece.buffer(block, i) for block in blocks) for i in range(piece.num_buffers))
    flags = tuple(piece.flags(block) for block in blocks)
    return SymmetricBuffer(
        rank=rank,
        size=piece.size,
        local=tuple(row[rank] for row in peers),
        peers=peers,
        pointers=_addresses([[t.data_ptr() for t in row] for row in peers], device),
        flags=flags[rank],
        peer_flags=flags,
        flag_pointers=_addresses([t.data_ptr() for t in flags], device),
        epoch=torch.zeros(1, dtype=torch.int32, device=device),
    )


def _addresses(values: list, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _round_up(num: int, multiple: int) -> int:
    return -(-num // multiple) * multiple
