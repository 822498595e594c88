"""Cases of RMSNorm: (rows, width)."""

import torch
from torch import Tensor

from megalite.kernels.cases import Case, each, randn
from megalite.kernels.rmsnorm.op import rmsnorm

EPS = 1e-5


def make_case(rows: int, width: int, *, dtype: torch.dtype) -> Case:
    """Normal rows and a weight around one."""

    def make(generator):
        return [randn((rows, width), dtype, generator), 1.0 + 0.1 * randn((width,), dtype, generator)], ()

    moved = rows * width * dtype.itemsize
    return Case(f"{rows}x{width}", dtype, make, 2 * moved, 3 * moved, flops=4 * rows * width)


def call(x: Tensor, weight: Tensor) -> Tensor:
    """The op."""
    return rmsnorm(x, weight, eps=EPS)


def truth(x: Tensor, weight: Tensor) -> Tensor:
    """The formula."""
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


CASES = each(make_case, [(1, 1), (3, 7), (16, 64), (65, 130), (0, 8)])
BENCH = each(make_case, [(8192, 4096), (4096, 8192), (2048, 16384)], (torch.bfloat16,))
