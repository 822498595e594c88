"""Linear cross entropy on one CPU rank that makes the logits once: gradients for an upstream gradient of 1, in forward.

dx of a token scales with that token's upstream gradient, so it is exact for any; dweight is a sum over tokens, so
backward may use it only if all upstream gradients are equal, as a trainer's 1/count is. Backward looks (on CPU that is
free) and otherwise makes the logits again, as reference.backward does.
"""

from typing import Any

import torch
from torch import Tensor

from megalite.batch import IGNORE
from megalite.kernels.cross_entropy import reference as cross_entropy
from megalite.kernels.cross_entropy.op import alone, combine
from megalite.kernels.linear_cross_entropy import chunks

SHARE = 4
"""It holds dweight until backward, thus is used when that is at most 1/SHARE of the logits' size."""


def pays(x: Tensor, weight: Tensor) -> bool:
    """Whether to spend the memory of a weight gradient to save a GEMM."""
    return x.device.type == "cpu" and SHARE * x.shape[1] <= x.shape[0] and weight.requires_grad


def forward(
    x: Tensor, weight: Tensor, targets: Tensor, *, num_valid: int, wgrad: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """loss (M,), normalizer (2, M), dx (M, D) and dweight (columns, D) in the compute dtype, summed by `wgrad`."""
    span = {"start": 0, "num_valid": num_valid}
    compute = torch.promote_types(x.dtype, torch.float32)
    loss, normalizer = x.new_empty(x.shape[0], dtype=compute), x.new_empty(2, x.shape[0], dtype=compute)
    dx, dweight = torch.empty_like(x), torch.zeros_like(weight, dtype=compute)
    for at, logits in chunks.logits_of(x, weight):
        statistics = cross_entropy.statistics(logits, targets[at], **span)
        loss[at], normalizer[:, at] = combine(statistics, targets[at], **span, reduce=alone)
        ones = torch.ones_like(loss[at])
        dlogits = cross_entropy.backward(ones, logits, normalizer[:, at], targets[at], **span)
        torch.mm(dlogits, weight, out=dx[at])
        wgrad.accumulate(dweight, dlogits, x[at])
    return loss, normalizer, dx, dweight


def common_upstream(dloss: Tensor, targets: Tensor) -> float | None:
    """The number that dloss holds for all tokens that count; None if they differ."""
    counted = dloss[targets != IGNORE]
    if counted.numel() == 0:
        return 0.0
    return counted[0].item() if bool((counted == counted[0]).all()) else None
