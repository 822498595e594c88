"""Recompute: keep less in forward, compute it again in backward, with identical numbers.

none: everything that backward reads is kept. Per block, config/recompute.py: `attention` keeps the rotated q, k, v and
runs the attention core again; `activation` keeps the MLP's pre-activation; `mlp` keeps the MLP's input, whose rows are
gathered again; `full` keeps a block's input only: `Link.recomputes` tells the pipeline runtime which links it runs
without a graph and again before their backward. Dropout masks are functions of global indices, so a second run draws
the same.
Reference: Korthikanti et al., arXiv:2205.05198, section 5.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, function, arguments):
        ctx.save_for_backward(x)
        ctx.function, ctx.arguments = function, arguments
        return function(x, *arguments)

    @staticmethod
    def backward(ctx, dy):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x, *ctx.arguments)
        torch.autograd.backward(y, dy)
        return x.grad, None, None


def replay(function: Callable[..., Tensor], x: Tensor, *arguments: Any) -> Tensor:
    """function(x, *arguments), keeping only x for backward, which runs the function again.

    Args:
        function: pure; gradients of parameters that it uses go where its own backward puts them.
        x:        the only input that is differentiated; must require a gradient when one is wanted.
    """
    return _Replay.apply(x, function, arguments)
