"""Column and row parallel linear layers, with sequence parallel.

A column layer (weight (out/tp, in)) gathers rows, then multiplies; a row layer (weight (out, in/tp)) multiplies, then
sums partial products into this rank's rows. Each pair of collective and GEMM is one function of an overlap backend.
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
from megalite.parallel.tp.begun import Finish, FinishReduce, way_of
from megalite.parallel.tp.overlap.base import ALL_ROWS, Passes
from megalite.parallel.tp.overlap.none import PLAIN
from megalite.parallel.tp.rows import TensorParallel, empty_param
from megalite.parallel.tp.specs import local_shape


class Activation(Protocol):
    """An elementwise op as pure functions, e.g. kernels.swiglu.reference."""

    def forward(self, x: Tensor) -> Tensor: ...
    def backward(self, dy: Tensor, x: Tensor) -> Tensor: ...


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer, weight, bias):
        y, full = layer.overlap.forward.gather_gemm(x, weight, bias, tp=layer.tp, site=f"{layer.site}.forward")
        ctx.save_for_backward(full)
        ctx.layer, ctx.weight, ctx.bias = layer, weight, bias
        return y

    @staticmethod
    def backward(ctx, dy):
        (full,), layer, weight = ctx.saved_tensors, ctx.layer, ctx.weight

        def param_grads() -> tuple[Tensor | None, Tensor | None]:
            return _column_grads(ctx, dy, full)

        if not ctx.needs_input_grad[0]:
            return None, None, *param_grads()
        site = f"{layer.site}.backward"
        dx, grads = layer.overlap.backward.dgrad_reduce(dy, weight, tp=layer.tp, site=site, meanwhile=param_grads)
        return dx, None, *grads


class _StartColumn(torch.autograd.Function):
    """A column layer's gather, which is begun; in backward its weight gradient under what is left of the sum of dx."""

    @staticmethod
    def forward(ctx, x, layer, weight, bias, way):
        ctx.layer, ctx.weight, ctx.bias, ctx.way = layer, weight, bias, way
        return way.gather(x, "forward")

    @staticmethod
    def backward(ctx, _):
        grads = _column_grads(ctx, *ctx.way.take_left())
        return ctx.way.wait(), None, *grads, None


class _FinishColumn(torch.autograd.Function):
    """A column layer behind a gather that was begun."""

    @staticmethod
    def forward(ctx, full, layer, add_bias, way):
        way.wait()
        ctx.save_for_backward(full)
        ctx.weight, ctx.way = layer.weight, way
        return F.linear(full, layer.weight, layer.bias if add_bias else None)

    @staticmethod
    def backward(ctx, dy):
        partial = dy.mm(ctx.weight)
        ctx.way.reduce(partial, "backward")
        ctx.way.left = (dy, *ctx.saved_tensors)
        return partial, None, None, None


def _column_grads(ctx, dy: Tensor, full: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Of weight and bias."""
    dweight = accumulate_wgrad(ctx.weight, dy, full, impl=ctx.layer.wgrad)
    return dweight, None if ctx.bias is None else accumulate_bias(ctx.bias, dy)


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer, weight, bias, activation):
        active = x if activation is None else activation.forward(x)
        ctx.save_for_backward(x)
        ctx.layer, ctx.weight, ctx.bias, ctx.activation = layer, weight, bias, activation
        return layer.overlap.forward.gemm_reduce(active, weight, bias, tp=layer.tp, site=f"{layer.site}.forward")

    @staticmethod
    def backward(ctx, dy):
        (x,), layer, weight, activation = ctx.saved_tensors, ctx.layer, ctx.weight, ctx.activation

        def weight_grad(full: Tensor, rows: slice = ALL_ROWS) -> Tensor | None:
            return _row_weight_grad(ctx, full[rows], x[rows])

        site = f"{layer.site}.backward"
        dx, dweight = layer.overlap.backward.gather_dgrad(dy, weight, tp=layer.tp, site=site, meanwhile=weight_grad)
        dbias = None if ctx.bias is None else accumulate_bias(ctx.bias, dy)
        if activation is not None:
            dx = activation.backward(dx, x)
        return dx, None, dweight, dbias, None


class _StartRow(torch.autograd.Function):
    """A row layer up to its sum, which is begun."""

    @staticmethod
    def forward(ctx, x, layer, weight, activation, way):
        active = x if activation is None else activation.forward(x)
        ctx.save_for_backward(x)
        ctx.layer, ctx.weight, ctx.activation, ctx.way = layer, weight, activation, way
        return way.reduce(F.linear(active, weight), "forward")

    @staticmethod
    def backward(ctx, _):
        (x,), full = ctx.saved_tensors, ctx.way.wait()
        dx = full.mm(ctx.weight)
        dweight = _row_weight_grad(ctx, full, x)
        return dx if ctx.activation is None else ctx.activation.backward(dx, x), None, dweight, None, None


def _row_weight_grad(ctx, dy: Tensor, x: Tensor) -> Tensor | None:
    """The share of these rows."""
    active = x if ctx.activation is None else ctx.activation.forward(x)
    return accumulate_wgrad(ctx.weight, dy, active, impl=ctx.layer.wgrad)


class _Linear(nn.Module):
    """Weight and optional bias, on the meta device, with their specs.

    Args:
        wgrad:   an implementation of kernels.wgrad.
        overlap: the overlap backends of forward and backward.
    """

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
        overlap: Passes = PLAIN,
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
        self.overlap = overlap


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
        return _ColumnLinear.apply(x, self, self.weight, self.bias if add_bias else None)

    def begin(self, x: Tensor, *, add_bias: bool = True) -> Finish:
        """As `forward`, in two halves: see begun.py."""
        if not self.tp.begins:
            return lambda: self(x, add_bias=add_bias)
        way = way_of(self.tp, self.site)
        full = _StartColumn.apply(x, self, self.weight, self.bias if add_bias else None, way)
        return lambda: _FinishColumn.apply(full, self, add_bias, way)


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
        return _RowLinear.apply(x, self, self.weight, self.bias, activation)

    def begin(self, x: Tensor, activation: Activation | None = None) -> Finish:
        """As `forward`, in two halves: see begun.py."""
        if not self.tp.begins:
            return lambda: self(x, activation)
        way = way_of(self.tp, self.site)
        own = _StartRow.apply(x, self, self.weight, activation, way)
        return lambda: FinishReduce.apply(own, self.bias, way)
