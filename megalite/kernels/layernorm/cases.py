"""Cases of LayerNorm: (rows, width, with the residual add before it)."""

import torch
from torch import Tensor

from megalite.kernels.cases import Case, each, grid_numbers, randn
from megalite.kernels.layernorm import reference
from megalite.kernels.layernorm.op import layernorm, layernorm_residual

EPS = 1e-5


def make_case(rows: int, width: int, residual: bool = False, *, dtype: torch.dtype) -> Case:
    """Normal rows off zero, a weight around one and a bias; with a residual, rows whose sum is exact."""

    def make(generator):
        x, weight, bias = (randn(shape, dtype, generator) for shape in ((rows, width), (width,), (width,)))
        params = [1.0 + 0.1 * weight, bias]
        if residual:
            x, other = (grid_numbers((rows, width), dtype, generator) for _ in range(2))
            return [x, *params, other], ()
        return [x + 0.5, *params], ()

    moved = rows * width * dtype.itemsize
    name = f"{rows}x{width}{'+residual' if residual else ''}"
    reads = (4 * moved, 4 * moved) if residual else (2 * moved, 3 * moved)
    return Case(name, dtype, make, *reads, flops=6 * rows * width)


def call(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None, *, impl=reference) -> Tensor:
    """The op; with a residual its two results, one below the other."""
    if residual is None:
        return layernorm(x, weight, bias, eps=EPS, impl=impl)
    return torch.cat(layernorm_residual(x, residual, weight=weight, bias=bias, eps=EPS, impl=impl))


def truth(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None) -> Tensor:
    """The formula."""
    total = x if residual is None else x + residual
    centred = total - total.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt() * weight + bias
    return y if residual is None else torch.cat([y, total])


CASES = each(make_case, [(1, 2), (3, 7), (16, 64), (65, 130), (0, 8), (3, 7, True), (17, 130, True)])
BENCH = each(make_case, [(8192, 4096), (4096, 8192), (2048, 16384), (8192, 4096, True)], (torch.bfloat16,))
