"""What the kernels are measured against: the op as one writes it in torch, also through torch.compile; Liger-Kernel's.

Each function takes what the op's case takes. They are for benchmarks only; nothing is checked against them.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-5
Function = Callable[..., Any]
"""Returns one tensor or a tuple of them."""


def rmsnorm(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Any:
    """torch's own; after an add, the normed sum and the sum."""
    if residual is None:
        return F.rms_norm(x, x.shape[-1:], weight, EPS)
    total = x + residual
    return F.rms_norm(total, x.shape[-1:], weight, EPS), total


def layernorm(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None) -> Any:
    """torch's own; after an add, the normed sum and the sum."""
    if residual is None:
        return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)
    total = x + residual
    return F.layer_norm(total, x.shape[-1:], weight, bias, EPS), total


def attention(qkv: Tensor, cos: Tensor, sin: Tensor, documents: None, heads: int, kv_heads: int) -> Tensor:
    """rope as below, then torch's scaled_dot_product_attention."""
    turned = rope(qkv, cos, sin, heads + kv_heads)
    q, k, v = (part.transpose(1, 2) for part in turned.split((heads, kv_heads, kv_heads), dim=2))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
    return mixed.transpose(1, 2).flatten(2).flatten(0, 1)


def rope(qkv: Tensor, cos: Tensor, sin: Tensor, rotated: int) -> Tensor:
    """Rotate-half, as transformers has it."""
    turned, passed = qkv[:, :, :rotated], qkv[:, :, rotated:]
    first, second = turned.chunk(2, dim=-1)
    cos, sin = (torch.cat([table, table], dim=-1)[:, None].to(qkv.dtype) for table in (cos, sin))
    return torch.cat([turned * cos + torch.cat([-second, first], dim=-1) * sin, passed], dim=2)


def swiglu(gate_up: Tensor) -> Tensor:
    """Two elementwise ops."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch's own, after an add."""
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


def cross_entropy(logits: Tensor, targets: Tensor, valid: int) -> Tensor:
    """torch's own, in fp32 as training loops call it."""
    return F.cross_entropy(logits[:, :valid].float(), targets, reduction="none")


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, *rest: Any) -> Tensor:
    """Whole logits, then torch's cross entropy in fp32."""
    return F.cross_entropy(F.linear(x, weight).float(), targets, reduction="none")


def wgrad(main: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    """A GEMM in the compute dtype, then an add in fp32."""
    return main.detach().add_(dy.detach().t() @ x.detach())


def dropout(x: Tensor, *rest: Any) -> Tensor:
    """torch's own, with its own generator."""
    return F.dropout(x, 0.1)


def grad_norm(grad: Tensor) -> Tensor:
    """torch's own norm, in fp32."""
    return torch.linalg.vector_norm(grad.detach())


def adamw(main: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    """torch's fused step, with what a training loop does around it: scale the gradient, write the bf16 copy."""
    options = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
    scaled = grad.detach() * 0.37
    step = torch.full((), 7.0, device=main.device)
    state = [[main.detach()], [scaled], [exp_avg.detach()], [exp_avg_sq.detach()], [], [step]]
    torch._fused_adamw_(*state, amsgrad=False, maximize=False, **options)
    main.detach().to(torch.bfloat16)


TORCH: dict[str, Function] = {
    function.__name__: function
    for function in (
        rmsnorm,
        layernorm,
        attention,
        rope,
        swiglu,
        gelu,
        cross_entropy,
        linear_cross_entropy,
        wgrad,
        dropout,
        adamw,
        grad_norm,
    )
}


def compiled(op: str) -> Function:
    """The torch version through torch.compile; dynamic shapes would cost speed."""
    return torch.compile(TORCH[op], dynamic=False)


def liger() -> dict[str, Function]:
    """Liger-Kernel's versions, or nothing where it is not installed."""
    try:
        found = importlib.import_module("liger_kernel.transformers.functional")
    except ImportError:
        return {}
    return {
        "rmsnorm": lambda x, weight: found.liger_rms_norm(x, weight, EPS, in_place=False),
        "layernorm": lambda x, weight, bias: found.liger_layer_norm(x, weight, bias, EPS),
        "swiglu": lambda gate_up: found.liger_swiglu(*gate_up.chunk(2, dim=-1)),
        "cross_entropy": lambda logits, targets, valid: found.liger_cross_entropy(
            logits[:, :valid], targets, reduction="sum"
        ),
        "linear_cross_entropy": lambda x, weight, targets, *rest: found.liger_fused_linear_cross_entropy(
            x, weight, targets, reduction="sum"
        ),
    }
