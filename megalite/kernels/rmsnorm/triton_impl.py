"""RMSNorm on the GPU, with the signatures of reference.py; see kernels/norm_kernels.py for the design."""

from torch import Tensor

from megalite.kernels.norm_kernels import compile_cases, run_backward, run_forward

COMPILE = compile_cases("rmsnorm", center=False)


def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y (M, D) and rstd (M, 1)."""
    y, _, _, rstd = run_forward(x, None, weight, None, eps)
    return y, rstd


def backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """dx and dweight."""
    return run_backward(dy, None, x, weight, None, rstd)[:2]


def forward_residual(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """y, x + residual (M, D), rstd (M, 1)."""
    y, total, _, rstd = run_forward(x, residual, weight, None, eps)
    return y, total, rstd


def backward_residual(dy: Tensor, dtotal: Tensor, total: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of x and of residual, which is one tensor, and dweight."""
    return run_backward(dy, dtotal, total, weight, None, rstd)[:2]
