"""Cases of GELU: (rows, ffn columns)."""

import math

import torch
from torch import Tensor

from megalite.kernels.cases import Case, each, randn
from megalite.kernels.gelu.op import gelu


def make_case(rows: int, width: int, *, dtype: torch.dtype) -> Case:
    """Wide normal inputs, into both tails."""

    def make(generator):
        return [3.0 * randn((rows, width), dtype, generator)], ()

    moved = rows * width * dtype.itemsize
    return Case(f"{rows}x{width}", dtype, make, 2 * moved, 3 * moved, flops=10 * rows * width)


def call(x: Tensor) -> Tensor:
    """The op."""
    return gelu(x)


def truth(x: Tensor) -> Tensor:
    """The formula."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


CASES = each(make_case, [(1, 1), (3, 7), (16, 64), (65, 129), (0, 8)])
BENCH = each(make_case, [(8192, 16384), (8192, 4096)], (torch.bfloat16,))
