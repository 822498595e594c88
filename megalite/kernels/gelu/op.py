"""GELU as an autograd function over a pure forward and backward."""

import torch
from torch import Tensor

from megalite.kernels.gelu import reference


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, impl):
        ctx.save_for_backward(x)
        ctx.impl = impl
        return impl.forward(x)

    @staticmethod
    def backward(ctx, dy):
        return ctx.impl.backward(dy, *ctx.saved_tensors), None


def gelu(x: Tensor, *, impl=reference) -> Tensor:
    """GELU in the tanh form, any shape; keeps its input for backward."""
    return _Gelu.apply(x, impl)
