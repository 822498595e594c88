"""The checked entry to AdamW kernels.

An implementation is a module with `step` as in reference.py and, where one call may serve many runs of elements,
`step_all(tensors, *, hyper, scale)`. Kernels get addresses, so what they rely on is checked here.
"""

from collections.abc import Sequence

from torch import Tensor

from megalite.kernels.adamw import reference
from megalite.kernels.adamw.hyper import Hyper, Tensors


def adamw_step(tensors: Sequence[Tensors], hyper: Hyper, *, scale: Tensor | float = 1.0, impl=reference) -> None:
    """Update main, exp_avg and exp_avg_sq of every run from grad * scale, in place; grad is left as it is.

    Args:
        scale: a number, or a scalar on the tensors' device that is read without a synchronisation.

    Raises:
        ValueError: tensors that are not flat, contiguous and alike.

    Memory: none but for the reference, which scales a copy of grad. 28 bytes per element move, 30 with a bf16 copy.
    """
    if hyper.step < 1:
        raise ValueError(f"step={hyper.step} must be at least 1: it counts this update")
    for one in tensors:
        _check(one)
    if hasattr(impl, "step_all"):
        impl.step_all(tensors, hyper=hyper, scale=scale)
        return
    for one in tensors:
        impl.step(one.main, one.grad, one.exp_avg, one.exp_avg_sq, hyper=hyper, scale=scale, out_copy=one.out_copy)


def _check(one: Tensors) -> None:
    alike = {"grad": one.grad, "exp_avg": one.exp_avg, "exp_avg_sq": one.exp_avg_sq}
    for name, tensor in alike.items():
        if (tensor.dtype, tensor.device) != (one.main.dtype, one.main.device):
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, main {one.main.dtype} on {one.main.device}")
    copies = {} if one.out_copy is None else {"out_copy": one.out_copy}
    for name, tensor in {"main": one.main, **alike, **copies}.items():
        if tensor.shape != (one.main.numel(),) or not tensor.is_contiguous():
            raise ValueError(f"{name} of shape {tuple(tensor.shape)} is not flat, contiguous and as long as main")
    if one.out_copy is not None and one.out_copy.device != one.main.device:
        raise ValueError(f"out_copy is on {one.out_copy.device}, main on {one.main.device}")
