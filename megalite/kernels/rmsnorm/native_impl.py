"""RMSNorm on the CPU in C++ (csrc/rmsnorm_cpu.cpp), with the signatures of reference.py.

Numerics: fp32 inside, and dweight leaves in fp32; every vector level and number of threads gives the same bits.
"""

import torch
from torch import Tensor

from megalite import native
from megalite.kernels.native_calls import as_table, how, problem
from megalite.kernels.tiles import contiguous_columns

__all__ = ["backward", "backward_residual", "forward", "forward_residual", "problem"]


def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y (M, D) and rstd (M, 1)."""
    y, _, rstd = _forward(x, None, weight, eps)
    return y, rstd


def backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """dx and dweight."""
    return _backward(dy, None, x, weight, rstd)


def forward_residual(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """y, x + residual (M, D), rstd (M, 1)."""
    return _forward(x, residual, weight, eps)


def backward_residual(dy: Tensor, dtotal: Tensor, total: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of x and of residual, which is one tensor, and dweight."""
    return _backward(dy, dtotal, total, weight, rstd)


def _forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor | None, Tensor]:
    inputs = [contiguous_columns(t) for t in (x, residual) if t is not None]
    y, rstd = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape[0], 1)
    total = None if residual is None else torch.empty_like(y)
    wide = as_table(weight)
    native.load().rmsnorm(
        _rows(inputs[0]),
        _rows(None if residual is None else inputs[1]),
        wide.data_ptr(),
        (y.data_ptr(), 0 if total is None else total.data_ptr(), rstd.data_ptr()),
        tuple(x.shape),
        eps,
        **how(*inputs),
    )
    return y, total, rstd


def _backward(dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    inputs = [contiguous_columns(t) for t in (dy, x, dtotal) if t is not None]
    dx, dweight = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape[1])
    wide = as_table(weight)
    native.load().rmsnorm_backward(
        (_rows(inputs[0]), _rows(None if dtotal is None else inputs[2]), _rows(inputs[1])),
        wide.data_ptr(),
        rstd.data_ptr(),
        (dx.data_ptr(), dweight.data_ptr()),
        tuple(x.shape),
        **how(*inputs),
    )
    return dx, dweight


def _rows(x: Tensor | None) -> tuple[int, int]:
    """Address and stride of rows; zeros for none."""
    return (0, 0) if x is None else (x.data_ptr(), x.stride(0))
