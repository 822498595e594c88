"""Recompute: keep less in forward, compute it again in backward, with identical numbers.

none: everything that backward reads is kept. Per block, config/recompute.py: `attention` keeps q, k, v and runs the
attention core again; `activation` keeps the MLP's pre-activation; `mlp` keeps the MLP's input, whose rows are
gathered again; `full` keeps a block's input only: `Link.recomputes` tells the pipeline runtime which links it runs
without a graph and again before their backward. Dropout masks are functions of global indices, so a second run draws
the same.
Reference: Korthikanti et al., arXiv:2205.05198, section 5.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, arguments, *inputs):
        ctx.save_for_backward(*inputs)
        ctx.function, ctx.arguments = function, arguments
        return function(*inputs, *arguments)

    @staticmethod
    def backward(ctx, dy):
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            y = ctx.function(*inputs, *ctx.arguments)
        torch.autograd.backward(y, dy)
        return None, None, *(x.grad for x in inputs)


def replay(function: Callable[..., Tensor], *inputs: Tensor, arguments: Sequence[Any] = ()) -> Tensor:
    """function(*inputs, *arguments), keeping only the inputs for backward, which runs the function again.

    Args:
        function:  pure; gradients of parameters that it uses go where its own backward puts them.
        inputs:    what is differentiated; all must require a gradient when one is wanted.
        arguments: the rest, e.g. the microbatch.
    """
    return _Replay.apply(function, arguments, *inputs)
