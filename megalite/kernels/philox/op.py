"""Runs of random numbers for consecutive global element indices, made in pieces that fit the cache."""

import torch
from torch import Tensor

from megalite.kernels.philox import reference
from megalite.kernels.philox.key import Key

PIECE = 1 << 15
"""Elements per piece: an int64 temporary of 256 KiB."""


def fill_normal(out: Tensor, key: Key, *, start: int, std: float) -> Tensor:
    """Fill contiguous `out` with normal(0, std) numbers of the elements start, start + 1, ...; returns `out`.

    Numerics: drawn in float64, then rounded once to out's dtype.
    """
    flat = out.view(-1)
    for low, index in _pieces(flat.numel(), start, out.device):
        flat[low : low + index.numel()] = reference.normal(index, key).mul_(std)
    return out


def fill_keep(out: Tensor, key: Key, *, start: int, threshold: int) -> Tensor:
    """Fill contiguous bool `out` with `word 0 >= threshold` of the elements start, start + 1, ...; returns `out`."""
    flat = out.view(-1)
    for low, index in _pieces(flat.numel(), start, out.device):
        flat[low : low + index.numel()] = reference.at_least(index, key, threshold=threshold)
    return out


def _pieces(numel: int, start: int, device: torch.device):
    for low in range(0, numel, PIECE):
        high = min(low + PIECE, numel)
        yield low, torch.arange(start + low, start + high, dtype=torch.int64, device=device)
