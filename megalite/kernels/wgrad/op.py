"""Where a parameter's gradient goes: into `param.main_grad` when the data parallel part has set it, else to autograd.

Invariant: with a main gradient `param.grad` stays None and nothing is divided; a function that calls these returns
their result as the parameter's gradient. The parameter is passed, never its data, since its storage may be freed in
between.

[Note: deferred gradients] A split backward computes input gradients first. While `param.deferred` is a list, what would
be added to the main gradient is put there as a call, to be made later (schedule action W), in the order it came.
"""

from collections.abc import Callable

from torch import Tensor

from megalite.kernels.wgrad import reference


def accumulate_wgrad(weight: Tensor, dy: Tensor, x: Tensor, *, impl=reference) -> Tensor | None:
    """Add dy^T x to the weight's main gradient and return None, or return it when there is no main gradient.

    Args:
        weight: (out, in) parameter.
        dy:     (M, out).
        x:      (M, in).
    """
    if _deferred(weight, lambda: impl.accumulate(weight.main_grad, dy, x)):
        return None
    main = getattr(weight, "main_grad", None)
    if main is None:
        return dy.t().mm(x)
    impl.accumulate(main, dy, x)
    return None


def _deferred(param: Tensor, action: Callable[[], object]) -> bool:
    """Whether the action was put off; see [Note: deferred gradients]."""
    queue = getattr(param, "deferred", None)
    if queue is not None:
        queue.append(action)
    return queue is not None


def accumulate_grad(param: Tensor, grad: Tensor) -> Tensor | None:
    """Add a finished gradient to the parameter's main gradient and return None, or return it in the parameter's
    dtype."""
    if _deferred(param, lambda: param.main_grad.add_(grad)):
        return None
    main = getattr(param, "main_grad", None)
    if main is None:
        return grad.to(param.dtype)
    main.add_(grad)
    return None


def accumulate_bias(bias: Tensor, dy: Tensor) -> Tensor | None:
    """Add the column sums of dy (M, out), taken in the main gradient's dtype, as `accumulate_grad` does."""
    if _deferred(bias, lambda: bias.main_grad.add_(dy.sum(0, dtype=bias.main_grad.dtype))):
        return None
    main = getattr(bias, "main_grad", None)
    return accumulate_grad(bias, dy.sum(0, dtype=None if main is None else main.dtype))


def accumulate_rows(param: Tensor, rows: Tensor, dy: Tensor) -> Tensor | None:
    """Add row i of dy to row rows[i] of the gradient of `param` (V, D); indices may repeat.

    Numerics: with a main gradient summed in its dtype.
    """
    main = getattr(param, "main_grad", None)
    grad = param.new_zeros(param.shape) if main is None else main
    grad.index_add_(0, rows, dy.to(grad.dtype))
    return grad if main is None else None
