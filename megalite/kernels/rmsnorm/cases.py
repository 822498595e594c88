"""Cases of RMSNorm: (rows, width, with the residual add before it)."""

import torch
from torch import Tensor

from megalite.kernels.cases import Case, each, grid_numbers, randn
from megalite.kernels.rmsnorm import reference
from megalite.kernels.rmsnorm.op import rmsnorm, rmsnorm_residual

EPS = 1e-5


def make_case(rows: int, width: int, residual: bool = False, *, dtype: torch.dtype) -> Case:
    """Normal rows and a weight around one; with a residual, rows whose sum is exact."""

    def make(generator):
        weight = 1.0 + 0.1 * randn((width,), dtype, generator)
        if residual:
            x, other = (grid_numbers((rows, width), dtype, generator) for _ in range(2))
            return [x, weight, other], ()
        return [randn((rows, width), dtype, generator), weight], ()

    moved = rows * width * dtype.itemsize
    name = f"{rows}x{width}{'+residual' if residual else ''}"
    reads = (4 * moved, 4 * moved) if residual else (2 * moved, 3 * moved)
    return Case(name, dtype, make, *reads, flops=4 * rows * width)


def call(x: Tensor, weight: Tensor, residual: Tensor | None = None, *, impl=reference) -> Tensor:
    """The op; with a residual its two results, one below the other."""
    if residual is None:
        return rmsnorm(x, weight, eps=EPS, impl=impl)
    return torch.cat(rmsnorm_residual(x, residual, weight=weight, eps=EPS, impl=impl))


def truth(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    """The formula."""
    total = x if residual is None else x + residual
    y = total / (total.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
    return y if residual is None else torch.cat([y, total])


CASES = each(make_case, [(1, 1), (3, 7), (16, 64), (65, 130), (0, 8), (3, 7, True), (17, 130, True)])
BENCH = each(make_case, [(8192, 4096), (4096, 8192), (2048, 16384), (8192, 4096, True)], (torch.bfloat16,))
