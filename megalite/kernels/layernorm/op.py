"""LayerNorm as an autograd function over a pure forward and backward."""

import torch
from torch import Tensor

from megalite.kernels.layernorm import reference
from megalite.kernels.wgrad import accumulate_grad


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, impl):
        y, mean, rstd = impl.forward(x, weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd)
        ctx.weight, ctx.bias, ctx.impl = weight, bias, impl
        return y

    @staticmethod
    def backward(ctx, dy):
        x, mean, rstd = ctx.saved_tensors
        dx, dweight, dbias = ctx.impl.backward(dy, x, ctx.weight, mean, rstd)
        return dx, accumulate_grad(ctx.weight, dweight), accumulate_grad(ctx.bias, dbias), None, None


def layernorm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float, impl=reference) -> Tensor:
    """LayerNorm of the rows of x (M, D) with weight and bias (D,); leading dims of x are folded into M.

    Memory: keeps x and two numbers per row for backward.
    Numerics: fp32 inside for bf16 and fp16; the parameters' gradients leave in fp32.
    """
    if not weight.shape == bias.shape == x.shape[-1:]:
        shapes = f"{tuple(weight.shape)} and {tuple(bias.shape)}"
        raise ValueError(f"layernorm weight and bias of shapes {shapes} do not fit rows of {x.shape[-1]} elements")
    return _LayerNorm.apply(x.reshape(-1, x.shape[-1]), weight, bias, eps, impl).view(x.shape)
