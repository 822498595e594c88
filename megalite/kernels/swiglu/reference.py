"""SwiGLU of a packed (gate, up) tensor: silu(gate) * up, fp32 inside (fp64 for fp64).

Reference: Shazeer, arXiv:2002.05202.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def forward(gate_up: Tensor) -> Tensor:
    """silu(gate) * up.

    Args:
        gate_up: (M, 2F): gate columns, then up columns.

    Returns:
        (M, F) in the input's dtype.
    """
    compute = torch.promote_types(gate_up.dtype, torch.float32)
    gate, up = gate_up.to(compute).chunk(2, dim=-1)
    return F.silu(gate).mul_(up).to(gate_up.dtype)


def backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """d(gate_up) (M, 2F), a new tensor."""
    compute = torch.promote_types(gate_up.dtype, torch.float32)
    gate, up = gate_up.to(compute).chunk(2, dim=-1)
    dy = dy.to(compute)
    out = torch.empty(gate_up.shape, dtype=compute, device=gate_up.device)
    dgate, dup = out.chunk(2, dim=-1)
    torch.ops.aten.silu.out(gate, out=dup).mul_(dy)
    torch.mul(dy, up, out=dgate)
    torch.ops.aten.silu_backward.grad_input(dgate, gate, grad_input=dgate)
    return out.to(gate_up.dtype)
