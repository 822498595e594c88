"""GELU, alone and fused with the bias add before it, as autograd functions over pure ones."""

import torch
from torch import Tensor

from megalite.kernels.gelu import reference
from megalite.kernels.wgrad import accumulate_grad


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, impl):
        ctx.save_for_backward(x)
        ctx.impl = impl
        return impl.forward(x)

    @staticmethod
    def backward(ctx, dy):
        return ctx.impl.backward(dy, *ctx.saved_tensors), None


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, impl):
        ctx.save_for_backward(x)
        ctx.bias, ctx.impl = bias, impl
        return impl.forward_bias(x, bias)

    @staticmethod
    def backward(ctx, dy):
        dx, dbias = ctx.impl.backward_bias(dy, *ctx.saved_tensors, ctx.bias)
        return dx, accumulate_grad(ctx.bias, dbias), None


class BiasGelu:
    """bias_gelu as an activation that a linear layer applies to its input and applies again in its backward.

    The bias's gradient goes where `kernels.wgrad` says; without a main gradient it is left in `bias.grad`.
    """

    def __init__(self, bias: Tensor, impl=reference):
        self.bias, self.impl = bias, impl

    def forward(self, x: Tensor) -> Tensor:
        """GELU of x + bias."""
        return self.impl.forward_bias(x, self.bias)

    def backward(self, dy: Tensor, x: Tensor) -> Tensor:
        """The gradient of x; that of the bias is accumulated."""
        dx, dbias = self.impl.backward_bias(dy, x, self.bias)
        left = accumulate_grad(self.bias, dbias)
        if left is not None:
            self.bias.grad = left if self.bias.grad is None else self.bias.grad + left
        return dx


def gelu(x: Tensor, *, impl=reference) -> Tensor:
    """GELU in the tanh form, any shape; keeps its input for backward."""
    return _Gelu.apply(x, impl)


def bias_gelu(x: Tensor, bias: Tensor, *, impl=reference) -> Tensor:
    """GELU of x + bias for x (..., F) and bias (F,); keeps x for backward.

    Numerics: the sum is not rounded to x's dtype; the bias's gradient leaves in fp32.
    """
    if bias.shape != x.shape[-1:]:
        raise ValueError(f"gelu bias of shape {tuple(bias.shape)} does not fit rows of {x.shape[-1]} elements")
    return _BiasGelu.apply(x, bias, impl)
