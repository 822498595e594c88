"""Which elements dropout keeps: a function of (key, global element index), so no layout changes it."""

import math
from fractions import Fraction

import torch
from torch import Tensor

from megalite.kernels.philox import Key, fill_keep


def keep_threshold(p: float) -> int:
    """The smallest word w whose uniform number (w + 0.5) / 2^32 is >= p."""
    return math.ceil(Fraction(p) * 2**32 - Fraction(1, 2))


def keep_mask(shape: tuple[int, ...], *, p: float, key: Key, starts: tuple[int, ...], device: torch.device) -> Tensor:
    """True where an element is kept.

    Args:
        starts: global index of the first element of each of len(starts) equal runs along dim 0 of `shape`; inside a
            run, indices are consecutive in row-major order.
    """
    mask = torch.empty(shape, dtype=torch.bool, device=device)
    for run, start in zip(mask.chunk(len(starts)), starts, strict=True):
        fill_keep(run, key, start=start, threshold=keep_threshold(p))
    return mask
