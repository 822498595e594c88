"""Cases of dropout: (rows, width, runs along the rows)."""

import torch
from torch import Tensor

from megalite.kernels.cases import Case, each, randn
from megalite.kernels.dropout import reference
from megalite.kernels.dropout.mask import keep_threshold
from megalite.kernels.dropout.op import dropout
from megalite.kernels.philox import Key
from megalite.kernels.philox.reference import words

P, KEY = 0.3, (0xFFFFFFF0, 7)


def make_case(rows: int, width: int, runs: int, *, dtype: torch.dtype) -> Case:
    """Normal numbers; runs that are not in order, the last across 2^32."""

    def make(generator):
        starts = tuple(2**32 - 5 - 1000 * i for i in range(runs))[::-1]
        return [randn((rows, width), dtype, generator)], (KEY, starts)

    moved = 2 * rows * width * dtype.itemsize
    return Case(f"{rows}x{width}r{runs}", dtype, make, moved, moved)


def call(x: Tensor, key: Key, starts: tuple[int, ...], *, impl=reference) -> Tensor:
    """The op."""
    return dropout(x, P, key=key, starts=starts, impl=impl)


def truth(x: Tensor, key: Key, starts: tuple[int, ...]) -> Tensor:
    """The mask from the words of each element's index."""
    run = x.numel() // len(starts)
    index = torch.cat([torch.arange(start, start + run, device=x.device) for start in starts])
    kept = words(index, key)[0] >= keep_threshold(P)
    return torch.where(kept.view(x.shape), x / (1.0 - P), 0.0)


CASES = each(make_case, [(1, 1, 1), (6, 35, 2), (33, 70, 1), (0, 4, 1)])
BENCH = each(make_case, [(8192, 8192, 1)], (torch.bfloat16,))
