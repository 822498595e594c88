"""Cross entropy per token; with `reduce`, of a vocabulary whose slices lie on several ranks (parallel/tp/loss.py)."""

from collections.abc import Callable

import torch
from torch import Tensor

from megalite.batch import IGNORE
from megalite.kernels.cross_entropy import reference

Reduce = Callable[[Tensor, str], None]
"""Reduce a tensor in place over the ranks that hold the other slices, with "max" or "sum"."""


def alone(tensor: Tensor, op: str) -> None:
    """The Reduce of a rank that holds the whole vocabulary."""


def combine(
    statistics: Tensor, targets: Tensor, *, start: int, num_valid: int, reduce: Reduce
) -> tuple[Tensor, Tensor]:
    """The loss per token (M,), 0 where the target is IGNORE, and the rows' normalizer (2, M) for backward.

    Args:
        statistics: (3, M) of this slice, from an implementation's `statistics`; overwritten.

    Communication: two reductions: M numbers (max), then 2*M (packed sum and target logit).
    Numerics: all logits are taken relative to the row's largest before they are summed, so a loss near zero of logits
    near 1e4 keeps its digits.
    """
    largest = statistics[0].clone()
    reduce(largest, "max")
    packed = statistics[1:]
    packed[0].mul_((statistics[0] - largest).exp_())
    outside = (targets < start) | (targets >= start + num_valid)
    packed[1].sub_(largest).masked_fill_(outside, 0.0)
    reduce(packed, "sum")
    loss = packed[0].log().sub_(packed[1]).masked_fill_(targets == IGNORE, 0.0)
    return loss, torch.stack((largest, packed[0]))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, start, num_valid, reduce, impl):
        ctx.at, ctx.impl = {"start": start, "num_valid": num_valid}, impl
        statistics = impl.statistics(logits, targets, **ctx.at)
        loss, normalizer = combine(statistics, targets, **ctx.at, reduce=reduce)
        ctx.save_for_backward(logits, normalizer, targets)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        logits, normalizer, targets = ctx.saved_tensors
        return ctx.impl.backward(dloss, logits, normalizer, targets, **ctx.at), None, None, None, None, None


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    start: int = 0,
    num_valid: int | None = None,
    reduce: Reduce = alone,
    impl=reference,
) -> Tensor:
    """Cross entropy of each row; 0, with zero gradient, where the target is IGNORE (-100). Not averaged.

    Args:
        logits:    (M, columns). Backward writes their gradient into this storage; dead afterwards.
        targets:   (M,) int64 vocabulary indices.
        start:     vocabulary index of column 0.
        num_valid: leading columns that are not padding; default all.
        reduce:    reduces over the ranks that hold the other columns.

    Returns:
        (M,) fp32 (fp64 for fp64).
    """
    check_targets("cross_entropy", targets, logits.shape[0])
    num_valid = logits.shape[1] if num_valid is None else num_valid
    return _CrossEntropy.apply(logits, targets, start, num_valid, reduce, impl)


def check_targets(op: str, targets: Tensor, num_rows: int) -> None:
    """Raises ValueError unless targets are (num_rows,) int64."""
    if targets.shape != (num_rows,) or targets.dtype != torch.int64:
        raise ValueError(f"{op} targets must be ({num_rows},) int64, not {tuple(targets.shape)} {targets.dtype}")
