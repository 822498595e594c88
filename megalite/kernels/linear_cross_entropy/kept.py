"""Linear cross entropy of few rows on the CPU: it keeps the logits, which backward then need not make again.

For one rank of a sharded vocabulary, whose gradients can't be made in forward as one_pass.py makes them, since the
rows' normalizers are only known behind a reduction.
"""

from typing import Any

import torch
from torch import Tensor

from megalite.kernels.cross_entropy import reference as cross_entropy
from megalite.kernels.linear_cross_entropy.chunks import Accumulate

ELEMENTS = 1 << 21
"""The most logits that are kept: 8 MB of fp32, for as long as the microbatch is between its forward and its
backward."""


def pays(x: Tensor, weight: Tensor) -> bool:
    """Whether to spend the memory of the logits to save a GEMM."""
    return x.device.type == "cpu" and x.shape[0] * weight.shape[0] <= ELEMENTS


def statistics(x: Tensor, weight: Tensor, targets: Tensor, **span: int) -> tuple[Tensor, Tensor]:
    """What reference.statistics returns, and the logits (M, columns)."""
    logits = torch.mm(x, weight.t())
    return cross_entropy.statistics(logits, targets, **span), logits


def backward(
    dloss: Tensor,
    logits: Tensor,
    x: Tensor,
    weight: Tensor,
    normalizer: Tensor,
    targets: Tensor,
    *,
    accumulate: Accumulate | None,
    **span: Any,
) -> Tensor:
    """As reference.backward, which makes the logits again; overwrites them with their gradient."""
    dlogits = cross_entropy.backward(dloss, logits, normalizer, targets, **span)
    if accumulate is not None:
        accumulate(dlogits, x)
    return torch.mm(dlogits, weight)
