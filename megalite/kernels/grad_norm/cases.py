"""Cases of the sum of squares: the number of elements."""

import torch
from torch import Tensor

from megalite.kernels.cases import Case, each, randn
from megalite.kernels.grad_norm import reference
from megalite.kernels.grad_norm.op import square_sum


def make_case(num: int, *, dtype: torch.dtype) -> Case:
    """Normal numbers over many orders of magnitude."""

    def make(generator):
        return [randn((num,), torch.float64, generator).pow(3).mul(1e-3).to(dtype)], ()

    return Case(f"{num}", dtype, make, num * dtype.itemsize, 0, flops=2 * num)


def call(grad: Tensor, *, impl=reference) -> Tensor:
    """The op."""
    return square_sum(grad.detach(), impl=impl)


def truth(grad: Tensor) -> Tensor:
    """The formula."""
    return grad.square().sum()


CASES = each(make_case, [(0,), (1,), (31,), (33,), (1000,), (16385,), (70001,)], (torch.float32,))
BENCH = each(make_case, [(45_000_000,)], (torch.float32,))
