"""What multiplying and summing over ranks gives, with all ranks' factors at hand."""

from collections.abc import Sequence

import torch
from torch import Tensor


def summed(factors: Sequence[tuple[Tensor, Tensor]], bias: Tensor | None, *, transposed: bool) -> Tensor:
    """The sum over ranks of x @ weight^T (x @ weight if transposed), plus the bias.

    Args:
        factors: one (x (M, K/W), weight (N, K/W) or (K/W, N)) per rank.

    Numerics: each product is rounded to x's dtype, as it travels in it; their sum, in rank order, is in fp32 (fp64 for
    fp64) and rounded once.
    """
    dtype = factors[0][0].dtype
    compute = torch.promote_types(dtype, torch.float32)
    total = torch.zeros((), dtype=compute)
    for x, weight in factors:
        product = x.to(compute) @ (weight if transposed else weight.t()).to(compute)
        total = total + product.to(dtype).to(compute)
    return (total if bias is None else total + bias.to(compute)).to(dtype)


def forward(factors: Sequence[tuple[Tensor, Tensor]], bias: Tensor | None, *, transposed: bool) -> list[Tensor]:
    """Each rank's rows (M/W, N) of `summed`."""
    return list(summed(factors, bias, transposed=transposed).chunk(len(factors)))
