"""Cases of GELU: (rows, ffn columns, with the bias add before it)."""

import math

import torch
from torch import Tensor

from megalite.kernels.cases import Case, each, randn
from megalite.kernels.gelu import reference
from megalite.kernels.gelu.op import bias_gelu, gelu


def make_case(rows: int, width: int, bias: bool = False, *, dtype: torch.dtype) -> Case:
    """Wide normal inputs, into both tails."""

    def make(generator):
        tensors = [3.0 * randn((rows, width), dtype, generator)]
        return tensors + ([randn((width,), dtype, generator)] if bias else []), ()

    moved = rows * width * dtype.itemsize
    name = f"{rows}x{width}{'+bias' if bias else ''}"
    return Case(name, dtype, make, 2 * moved, 3 * moved, flops=10 * rows * width)


def call(x: Tensor, bias: Tensor | None = None, *, impl=reference) -> Tensor:
    """The op."""
    return gelu(x, impl=impl) if bias is None else bias_gelu(x, bias, impl=impl)


def truth(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """The formula."""
    x = x if bias is None else x + bias
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


CASES = each(make_case, [(1, 1), (3, 7), (16, 64), (65, 129), (0, 8), (3, 7, True), (65, 129, True)])
BENCH = each(make_case, [(8192, 16384), (8192, 4096), (8192, 16384, True)], (torch.bfloat16,))
