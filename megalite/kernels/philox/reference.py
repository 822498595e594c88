"""Philox4x32-10 in plain torch: random numbers that are a pure function of (key, element index).

Invariant: element i uses the counter words (low 32 bits of i, high 32 bits of i, 0, 0), so a shard draws what the full
tensor would hold at its place, on any device and in any layout. Words are held in int64; products wrap, which keeps
their bits.
Reference: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11.
"""

import math

import torch
from torch import Tensor

from megalite.kernels.philox.key import Key

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF
ROUNDS = 10

Word = Tensor | int


def philox4x32(counter: tuple[Word, Word, Word, Word], key: Key) -> tuple[Word, Word, Word, Word]:
    """Ten rounds over a 128-bit counter and a 64-bit key, both in 32-bit words; ints and int64 tensors may be mixed."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1 = ((p1 >> 32) & MASK) ^ c1 ^ k0, p1 & MASK
        c2, c3 = ((p0 >> 32) & MASK) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def words(index: Tensor, key: Key) -> tuple[Tensor, Tensor]:
    """The first two words of each element's block: int64 tensors in [0, 2^32), of the shape of `index` (int64)."""
    w0, w1, _, _ = philox4x32((index & MASK, index >> 32, 0, 0), key)
    return w0, w1


def normal(index: Tensor, key: Key) -> Tensor:
    """Standard normal numbers in float64 by Box-Muller from words 0 and 1 of each element."""
    w0, w1 = words(index, key)
    radius = w0.double().add_(0.5).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
    return w1.double().add_(0.5).mul_(2.0**-32 * 2.0 * math.pi).cos_().mul_(radius)


def at_least(index: Tensor, key: Key, *, threshold: int) -> Tensor:
    """Whether word 0 of each element is >= threshold: a Bernoulli draw with probability 1 - threshold / 2^32."""
    return torch.ge(words(index, key)[0], threshold)
