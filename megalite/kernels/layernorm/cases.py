"""Cases of LayerNorm: (rows, width)."""

import torch
from torch import Tensor

from megalite.kernels.cases import Case, each, randn
from megalite.kernels.layernorm.op import layernorm

EPS = 1e-5


def make_case(rows: int, width: int, *, dtype: torch.dtype) -> Case:
    """Normal rows off zero, a weight around one and a bias."""

    def make(generator):
        x, weight, bias = (randn(shape, dtype, generator) for shape in ((rows, width), (width,), (width,)))
        return [x + 0.5, 1.0 + 0.1 * weight, bias], ()

    moved = rows * width * dtype.itemsize
    return Case(f"{rows}x{width}", dtype, make, 2 * moved, 3 * moved, flops=6 * rows * width)


def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The op."""
    return layernorm(x, weight, bias, eps=EPS)


def truth(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The formula."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt() * weight + bias


CASES = each(make_case, [(1, 2), (3, 7), (16, 64), (65, 130), (0, 8)])
BENCH = each(make_case, [(8192, 4096), (4096, 8192), (2048, 16384)], (torch.bfloat16,))
