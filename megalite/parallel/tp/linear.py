"""Column and row parallel linear layers, with sequence parallel.

A column layer (weight (out/tp, in)) gathers rows, then multiplies; a row layer (weight (out, in/tp)) multiplies, then
sums partial products into this rank's rows. Each pair of collective and GEMM is one function, so that an overlapped
one can take its place.
Invariant: autograd keeps the parameter, never its data, since a ZeRO unit frees and regathers the storage in between.
Reference: Shoeybi et al., arXiv:1909.08053, section 3; Korthikanti et al., arXiv:2205.05198.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.kernels.wgrad import accumulate_bias, accumulate_wgrad
from megalite.kernels.wgrad import reference as wgrad_reference
from megalite.parallel.spec import ParamSpec
from megalite.parallel.tp.rows import TensorParallel, empty_param, gather_rows, reduce_rows, start_reduce_rows
from megalite.parallel.tp.specs import local_shape


class Activation(Protocol):
    """An elementwise op as pure functions, e.g. kernels.swiglu.reference."""

    def forward(self, x: Tensor) -> Tensor: ...
    def backward(self, dy: Tensor, x: Tensor) -> Tensor: ...


def gather_gemm(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, tp: TensorParallel, site: str
) -> tuple[Tensor, Tensor]:
    """Gather the rows of x and multiply: (M, in) @ weight^T + bias, and the gathered x (M, in)."""
    full = gather_rows(x, tp, site=site)
    return F.linear(full, weight, bias), full


def gemm_reduce(x: Tensor, weight: Tensor, bias: Tensor | None, *, tp: TensorParallel, site: str) -> Tensor:
    """Multiply x (M, in/tp) @ weight^T and sum over tp into this rank's rows; the bias is added once, to the sum."""
    if tp.size == 1:
        return F.linear(x, weight, bias)
    y = reduce_rows(F.linear(x, weight), tp, site=site)
    return y if bias is None else y.add_(bias)


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, tp, site, wgrad):
        y, full = gather_gemm(x, weight, bias, tp=tp, site=f"{site}.forward")
        ctx.save_for_backward(full)
        ctx.weight, ctx.bias, ctx.tp, ctx.site, ctx.wgrad = weight, bias, tp, site, wgrad
        return y

    @staticmethod
    def backward(ctx, dy):
        (full,) = ctx.saved_tensors
        work, dx = None, None
        if ctx.needs_input_grad[0]:
            work, dx = start_reduce_rows(dy.mm(ctx.weight), ctx.tp, site=f"{ctx.site}.backward")
        dweight = accumulate_wgrad(ctx.weight, dy, full, impl=ctx.wgrad)
        dbias = None if ctx.bias is None else accumulate_bias(ctx.bias, dy)
        if work is not None:
            work.wait()
        return dx, dweight, dbias, None, None, None


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, tp, site, wgrad, activation):
        active = x if activation is None else activation.forward(x)
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.tp, ctx.site, ctx.wgrad, ctx.activation = weight, bias, tp, site, wgrad, activation
        return gemm_reduce(active, weight, bias, tp=tp, site=f"{site}.forward")

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        activation = ctx.activation
        full = gather_rows(dy, ctx.tp, site=f"{ctx.site}.backward")
        active = x if activation is None else activation.forward(x)
        dweight = accumulate_wgrad(ctx.weight, full, active, impl=ctx.wgrad)
        dbias = None if ctx.bias is None else accumulate_bias(ctx.bias, dy)
        dx = full.mm(ctx.weight) if ctx.needs_input_grad[0] else None
        if activation is not None and dx is not None:
            dx = activation.backward(dx, x)
        return dx, dweight, dbias, None, None, None, None


class _Linear(nn.Module):
    """Weight and optional bias, on the meta device, with their specs; `wgrad` is an implementation of kernels.wgrad."""

    def __init__(
        self,
        weight: ParamSpec,
        bias: ParamSpec | None,
        *,
        tp: TensorParallel,
        dtype: torch.dtype,
        site: str,
        padding: int = 0,
        wgrad=wgrad_reference,
    ):
        super().__init__()
        self.weight = empty_param(local_shape(weight, padding=padding), dtype)
        self.weight.spec = weight
        self.bias = None
        if bias is not None:
            self.bias = empty_param(local_shape(bias, padding=padding), dtype)
            self.bias.spec = bias
        self.tp = tp
        self.site = site
        self.wgrad = wgrad


class ColumnParallelLinear(_Linear):
    """y = x W^T + b with the rows of W and b sharded over tp (several logical tensors may be stacked in W).

    Communication: forward all-gathers x's rows, backward reduce-scatters dx (sequence parallel); else backward
    all-reduces dx.
    Memory: keeps the gathered x for the weight gradient, so that backward gathers nothing.
    """

    def forward(self, x: Tensor, *, add_bias: bool = True) -> Tensor:
        """(M/tp, in), or (M, in) without sequence parallel -> (M, out/tp).

        Args:
            add_bias: False where the caller adds `self.bias` itself, inside its next op.
        """
        return _ColumnLinear.apply(x, self.weight, self.bias if add_bias else None, self.tp, self.site, self.wgrad)


class RowParallelLinear(_Linear):
    """y = x W^T + b with the columns of W sharded over tp; b is replicated and added once.

    Communication: forward reduce-scatters y, backward all-gathers dy's rows (sequence parallel); else forward
    all-reduces y.
    """

    def forward(self, x: Tensor, activation: Activation | None = None) -> Tensor:
        """(M, in/tp) -> (M/tp, out), or (M, out) without sequence parallel.

        Args:
            activation: applied to x first, and again in backward: only its input is kept.
        """
        return _RowLinear.apply(x, self.weight, self.bias, self.tp, self.site, self.wgrad, activation)
