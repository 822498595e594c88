"""Cross entropy of x @ weight^T per token, without the logits.

Backward makes the logits again, chunk by chunk, instead of keeping them (but few ones on CPU): one more GEMM for the
memory of (M, columns). Autograd keeps the parameter, never its data. With `reduce`, the vocabulary's slices lie on
several ranks and dx is this rank's partial sum.
Reference: Wijmans et al., arXiv:2411.09009; Hsu et al., arXiv:2410.10989, section 3.2.
"""

from functools import partial

import torch
from torch import Tensor

from megalite.kernels.cross_entropy import Reduce, alone, check_targets, combine
from megalite.kernels.linear_cross_entropy import kept, one_pass, reference
from megalite.kernels.wgrad import reference as wgrad_reference


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, start, num_valid, reduce, impl, wgrad, keeps):
        ctx.weight, ctx.span, ctx.impl, ctx.wgrad = weight, {"start": start, "num_valid": num_valid}, impl, wgrad
        ctx.logits = None
        if keeps:
            statistics, ctx.logits = kept.statistics(x, weight, targets, **ctx.span)
        else:
            statistics = impl.statistics(x, weight, targets, **ctx.span)
        loss, normalizer = combine(statistics, targets, **ctx.span, reduce=reduce)
        ctx.save_for_backward(x, normalizer, targets)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        logits, ctx.logits = ctx.logits, None  # a second backward makes them again
        dx, dweight = _gradients(ctx, dloss, *ctx.saved_tensors, logits=logits)
        return dx, dweight, None, None, None, None, None, None, None


class _OnePass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, num_valid, impl, wgrad):
        ctx.weight, ctx.span, ctx.impl, ctx.wgrad = weight, {"start": 0, "num_valid": num_valid}, impl, wgrad
        loss, normalizer, dx, dweight = one_pass.forward(x, weight, targets, num_valid=num_valid, wgrad=wgrad)
        ctx.save_for_backward(x, normalizer, targets, dx, dweight)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        x, normalizer, targets, dx, dweight = ctx.saved_tensors
        upstream = one_pass.common_upstream(dloss, targets)
        if upstream is None:
            dx, dweight = _gradients(ctx, dloss, x, normalizer, targets)
            return dx, dweight, None, None, None, None
        main = getattr(ctx.weight, "main_grad", None)
        if main is not None:
            main.add_(dweight, alpha=upstream)
        own = None if main is not None else (dweight * upstream).to(dx.dtype)
        return dx * upstream, own, None, None, None, None


def _gradients(
    ctx, dloss: Tensor, x: Tensor, normalizer: Tensor, targets: Tensor, *, logits: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """dx, and the weight's gradient unless it went into its main gradient; from the logits where they were kept."""
    weight = ctx.weight
    main = getattr(weight, "main_grad", None)
    total = main
    if main is None and weight.requires_grad:
        total = torch.zeros_like(weight, dtype=normalizer.dtype)
    accumulate = None if total is None else partial(ctx.wgrad.accumulate, total)
    rest = (x, weight, normalizer, targets)
    if logits is None:
        dx = ctx.impl.backward(dloss, *rest, accumulate=accumulate, **ctx.span)
    else:
        dx = kept.backward(dloss, logits, *rest, accumulate=accumulate, **ctx.span)
    return dx, total.to(weight.dtype) if main is None and total is not None else None


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    start: int = 0,
    num_valid: int | None = None,
    reduce: Reduce = alone,
    impl=reference,
    wgrad=wgrad_reference,
) -> Tensor:
    """Cross entropy of each row of x @ weight^T; 0, with zero gradients, where the target is IGNORE. Not averaged.

    Args:
        x:         (M, D).
        weight:    (columns, D); its gradient goes to `main_grad` if it has one.
        targets:   (M,) int64 vocabulary indices.
        start:     vocabulary index of row 0 of weight.
        num_valid: leading rows of weight that are not padding; default all.
        reduce:    reduces over the ranks that hold the other rows of weight.
        wgrad:     an implementation of kernels/wgrad, which adds up the weight's gradient.

    Returns:
        (M,) fp32 (fp64 for fp64).

    Memory: one chunk of logits; one rank on CPU with few columns in x also holds the weight's gradient (one_pass.py),
    and few logits on CPU are kept for backward (kept.py).
    """
    check_targets("linear_cross_entropy", targets, x.shape[0])
    if x.shape[1:] != weight.shape[1:]:
        raise ValueError(f"linear_cross_entropy: rows of {x.shape[1]} do not fit weight {tuple(weight.shape)}")
    num_valid = weight.shape[0] if num_valid is None else num_valid
    if impl is reference and reduce is alone and torch.is_grad_enabled() and one_pass.pays(x, weight):
        return _OnePass.apply(x, weight, targets, num_valid, impl, wgrad)
    keeps = impl is reference and torch.is_grad_enabled() and kept.pays(x, weight)
    return _LinearCrossEntropy.apply(x, weight, targets, start, num_valid, reduce, impl, wgrad, keeps)
