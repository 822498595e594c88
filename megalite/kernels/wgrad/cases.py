"""Cases of the weight gradient: (rows, out, in)."""

import torch
from torch import Tensor

from megalite.kernels.cases import Case, each, randn
from megalite.kernels.wgrad import reference


def make_case(rows: int, out: int, width: int, *, dtype: torch.dtype) -> Case:
    """A main gradient that already holds something, dy and x."""

    def make(generator):
        main = randn((out, width), torch.promote_types(dtype, torch.float32), generator)
        return [main, randn((rows, out), dtype, generator), randn((rows, width), dtype, generator)], ()

    moved = rows * (out + width) * dtype.itemsize + 2 * out * width * 4
    return Case(f"{rows}x{out}x{width}", dtype, make, moved, 0, flops=2 * rows * out * width)


def call(main: Tensor, dy: Tensor, x: Tensor, *, impl=reference) -> Tensor:
    """The op, on a copy of main."""
    main, dy, x = main.detach().clone(), dy.detach(), x.detach()
    impl.accumulate(main, dy, x)
    return main


def truth(main: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    """The formula."""
    return main + torch.einsum("mo,mi->oi", dy, x)


CASES = each(make_case, [(1, 1, 1), (5, 3, 7), (64, 32, 48), (0, 4, 4)])
BENCH = each(make_case, [(8192, 4096, 4096), (8192, 28672, 8192)], (torch.bfloat16,))
