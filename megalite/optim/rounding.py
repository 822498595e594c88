"""bf16 moments: fp32 values are rounded up or down at random, so that on average nothing is lost.

Rounded to nearest, a moving average stops to move when a step's change is below half a unit of its last place.
Invariant: the random bits are a function of (seed, kind of state, logical name, update, global element index), so
every layout, replica and resumed run rounds the same values to the same bits.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megalite.kernels.philox import reference, stream_key
from megalite.parallel.spec import Part

PIECE = 1 << 16
"""Elements rounded at once: bounds the int64 temporaries."""


def round_stochastic(values: Tensor, words: Tensor) -> Tensor:
    """fp32 values as bf16, each to one of its two neighbours with a probability that makes the mean exact.

    Args:
        words: int64 random words; 16 of their bits are used.

    Numerics: what bf16 holds exactly, zero among it, and values that are not finite stay as they are.
    """
    noise = (words & 0xFFFF).to(torch.int32)
    rounded = (values.view(torch.int32) + noise).bitwise_and_(-0x10000).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def store_rounded(out: Tensor, values: Tensor, part: Part, offset: int, *, key: tuple[int, int]) -> None:
    """Round `values`, elements [offset, offset + n) of a part's box in row-major order, into bf16 `out`."""
    for at, index in _indices(part, offset, values.numel(), values.device):
        word, _ = reference.words(index, key)
        out[at] = round_stochastic(values[at], word)


def moments_key(seed: int, kind: str, name: str, update: int) -> tuple[int, int]:
    """The stream of one kind of state of a logical tensor in one update."""
    return stream_key(seed, "moments", kind, name, update)


def _indices(part: Part, offset: int, num: int, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
    """Pieces of a run and their elements' row-major indices in the logical tensor."""
    for low in range(0, num, PIECE):
        at = slice(low, min(low + PIECE, num))
        element = torch.arange(offset + at.start, offset + at.stop, dtype=torch.int64, device=device)
        index, stride = torch.zeros_like(element), 1
        for size, start, whole in zip(
            reversed(part.shape), reversed(part.start), reversed(part.global_shape), strict=True
        ):
            index += (element % size + start) * stride
            element = element // size
            stride *= whole
        yield at, index
