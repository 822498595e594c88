"""Cross entropy per token on one rank that holds the whole vocabulary; the sharded one is parallel/tp/loss.py."""

from collections.abc import Callable

import torch
from torch import Tensor

from megalite.kernels.cross_entropy import reference

Reduce = Callable[[Tensor, str], None]
"""Reduce a tensor in place over the ranks that hold the other slices, with "max" or "sum"."""


def _alone(tensor: Tensor, op: str) -> None:
    """The whole vocabulary is here."""


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, start, num_valid, reduce, impl):
        maximum = impl.row_max(logits, num_valid)
        reduce(maximum, "max")
        packed = impl.sum_and_target(logits, maximum, targets, start=start, num_valid=num_valid)
        reduce(packed, "sum")
        ctx.save_for_backward(logits, packed[0].log().add_(maximum), targets)
        ctx.start, ctx.num_valid, ctx.impl = start, num_valid, impl
        return impl.loss(packed, targets)

    @staticmethod
    def backward(ctx, dloss):
        logits, log_sum, targets = ctx.saved_tensors
        at = {"start": ctx.start, "num_valid": ctx.num_valid}
        return ctx.impl.backward(dloss, logits, log_sum, targets, **at), None, None, None, None, None


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    start: int = 0,
    num_valid: int | None = None,
    reduce: Reduce = _alone,
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
    if targets.shape != logits.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"cross_entropy targets must be ({logits.shape[0]},) int64, not {tuple(targets.shape)} {targets.dtype}"
        )
    num_valid = logits.shape[1] if num_valid is None else num_valid
    return _CrossEntropy.apply(logits, targets, start, num_valid, reduce, impl)
