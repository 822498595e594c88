"""SwiGLU as an autograd function over a pure forward and backward."""

import torch
from torch import Tensor

from megalite.kernels.swiglu import reference


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, impl):
        ctx.save_for_backward(gate_up)
        ctx.impl = impl
        return impl.forward(gate_up)

    @staticmethod
    def backward(ctx, dy):
        return ctx.impl.backward(dy, *ctx.saved_tensors), None


def swiglu(gate_up: Tensor, *, impl=reference) -> Tensor:
    """silu(gate) * up for gate_up (M, 2F) with the gate columns first; keeps its input for backward."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"swiglu needs an even number of columns (gate, up), not {gate_up.shape[-1]}")
    return _SwiGlu.apply(gate_up, impl)
