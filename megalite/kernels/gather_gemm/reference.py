"""What gathering and multiplying gives, with all ranks' rows at hand."""

from collections.abc import Sequence

import torch
from torch import Tensor


def forward(
    shards: Sequence[Tensor], weight: Tensor, bias: Tensor | None, *, transposed: bool
) -> tuple[Tensor, Tensor]:
    """One rank's product of all rows, and all rows.

    Args:
        shards:     one (M/W, K) per rank.
        weight:     (N, K), or (K, N) if transposed.
        bias:       (N,), added to each row.
        transposed: as the gradient of the input takes the weight.

    Returns:
        (M, N) and (M, K). Products are summed in fp32 (fp64 for fp64) and rounded once.
    """
    full = torch.cat(list(shards))
    compute = torch.promote_types(full.dtype, torch.float32)
    y = full.to(compute) @ (weight if transposed else weight.t()).to(compute)
    return (y if bias is None else y + bias.to(compute)).to(full.dtype), full
