"""The tanh form of GELU (GPT-2), alone and with the bias add before it, fp32 inside (fp64 for fp64).

Reference: Hendrycks and Gimpel, arXiv:1606.08415.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def forward(x: Tensor) -> Tensor:
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), in x's dtype."""
    return F.gelu(x.to(torch.promote_types(x.dtype, torch.float32)), approximate="tanh").to(x.dtype)


def backward(dy: Tensor, x: Tensor) -> Tensor:
    """dx in x's dtype."""
    compute = torch.promote_types(x.dtype, torch.float32)
    return torch.ops.aten.gelu_backward(dy.to(compute), x.to(compute), approximate="tanh").to(x.dtype)


def forward_bias(x: Tensor, bias: Tensor) -> Tensor:
    """GELU of x + bias (F,), the sum in the compute dtype; in x's dtype."""
    compute = torch.promote_types(x.dtype, torch.float32)
    return F.gelu(x.to(compute) + bias, approximate="tanh").to(x.dtype)


def backward_bias(dy: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """dx in x's dtype; dbias (F,), its sum over all rows, in the compute dtype."""
    compute = torch.promote_types(x.dtype, torch.float32)
    dx = torch.ops.aten.gelu_backward(dy.to(compute), x.to(compute) + bias, approximate="tanh")
    return dx.to(x.dtype), dx.reshape(-1, dx.shape[-1]).sum(0)
