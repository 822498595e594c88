"""Philox4x32-10 in plain torch: random numbers that are a pure function of (key, element index).

Invariant: element i uses the counter words (low 32 bits of i, high 32 bits of i, 0, 0), so a shard draws what the full
tensor would hold at its place, on any device and in any layout. Words are held in int64; products wrap, which keeps
their bits. On CPU the compiled extension, if it is there, makes the same words faster.
Reference: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megalite import native
from megalite.kernels.philox.key import Key

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF
ROUNDS = 10
PIECE = {"cpu": 1 << 15, "cuda": 1 << 22}
"""Elements per piece of a run: on CPU the temporaries stay in the cache, on a GPU launches are few."""

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


def fill_normal(flat: Tensor, key: Key, *, start: int, std: float) -> None:
    """Fill flat (n,) with normal(0, std) numbers of the elements start, start + 1, ...: Box-Muller from words 0 and 1.

    Numerics: drawn in float64, then rounded once to flat's dtype.
    """
    for at, w0, w1 in _runs(flat, key, start):
        radius = w0.double().add_(0.5).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
        flat[at] = w1.double().add_(0.5).mul_(2.0**-32 * 2.0 * math.pi).cos_().mul_(radius).mul_(std)


def fill_keep(flat: Tensor, key: Key, *, start: int, threshold: int) -> None:
    """Fill bool flat (n,) with `word 0 >= threshold` of the elements start, start + 1, ...: true with probability
    1 - threshold / 2^32."""
    for at, w0, _ in _runs(flat, key, start):
        torch.ge(w0, threshold, out=flat[at])


def _runs(flat: Tensor, key: Key, start: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Pieces of flat and the words of their elements, in int64."""
    size, device = PIECE.get(flat.device.type, PIECE["cuda"]), flat.device
    compiled = native.load() if device.type == "cpu" else None
    for low in range(0, flat.numel(), size):
        at = slice(low, min(low + size, flat.numel()))
        if compiled is None:
            index = torch.arange(start + at.start, start + at.stop, dtype=torch.int64, device=device)
            yield at, *words(index, key)
        else:
            made = compiled.philox_words(*key, start + at.start, at.stop - at.start)
            yield at, *(torch.from_numpy(word).to(torch.int64) for word in made)
