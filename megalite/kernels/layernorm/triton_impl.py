"""LayerNorm on the GPU, with the signatures of reference.py; see kernels/norm_kernels.py for the design."""

from torch import Tensor

from megalite.kernels.norm_kernels import compile_cases, run_backward, run_forward

COMPILE = compile_cases("layernorm", center=True)


def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """y (M, D), mean and rstd (M, 1)."""
    y, _, mean, rstd = run_forward(x, None, weight, bias, eps)
    return y, mean, rstd


def backward(dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight, dbias."""
    return run_backward(dy, None, x, weight, mean, rstd)


def forward_residual(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, x + residual (M, D), mean and rstd (M, 1)."""
    return run_forward(x, residual, weight, bias, eps)


def backward_residual(
    dy: Tensor, dtotal: Tensor, total: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of x and of residual, which is one tensor; dweight and dbias."""
    return run_backward(dy, dtotal, total, weight, mean, rstd)
