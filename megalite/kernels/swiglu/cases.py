"""Cases of SwiGLU: (rows, ffn columns)."""

import torch
from torch import Tensor

from megalite.kernels.cases import Case, each, randn
from megalite.kernels.swiglu import reference
from megalite.kernels.swiglu.op import swiglu


def make_case(rows: int, width: int, *, dtype: torch.dtype) -> Case:
    """Wide normal inputs, into both tails of the sigmoid."""

    def make(generator):
        return [3.0 * randn((rows, 2 * width), dtype, generator)], ()

    moved = rows * width * dtype.itemsize
    return Case(f"{rows}x{width}", dtype, make, 3 * moved, 5 * moved, flops=6 * rows * width)


def call(gate_up: Tensor, *, impl=reference) -> Tensor:
    """The op."""
    return swiglu(gate_up, impl=impl)


def truth(gate_up: Tensor) -> Tensor:
    """The formula."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate / (1.0 + torch.exp(-gate)) * up


CASES = each(make_case, [(1, 1), (3, 7), (16, 64), (65, 129), (0, 8)])
BENCH = each(make_case, [(8192, 14336), (8192, 3584)], (torch.bfloat16,))
