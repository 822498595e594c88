"""Rotary position embedding of a packed (q, k, v) tensor: q and k heads are rotated, v heads pass.

A head's element i and i + H/2 form a pair (the rotate-half convention of Llama in transformers).
Reference: Su et al., arXiv:2104.09864.
"""

import torch
from torch import Tensor


def forward(qkv: Tensor, cos: Tensor, sin: Tensor, num_rotated: int) -> Tensor:
    """Rotate the first `num_rotated` heads.

    Args:
        qkv:      (B, S, heads, H).
        cos, sin: (S, H/2) in the compute dtype.

    Returns:
        (B, S, heads, H), a new tensor.
    """
    return _rotate(qkv, cos, sin, num_rotated, 1.0)


def backward(dqkv: Tensor, cos: Tensor, sin: Tensor, num_rotated: int) -> Tensor:
    """The inverse rotation of the gradient."""
    return _rotate(dqkv, cos, sin, num_rotated, -1.0)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, num_rotated: int, sign: float) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out[:, :, num_rotated:] = x[:, :, num_rotated:]
    first, second = x[:, :, :num_rotated].chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    if x.dtype == cos.dtype:
        out_first, out_second = out[:, :, :num_rotated].chunk(2, dim=-1)
        torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-sign)
        torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=sign)
        return out
    wide_first, wide_second = first.to(cos.dtype), second.to(cos.dtype)
    turned = (
        (wide_first * cos).addcmul_(wide_second, sin, value=-sign),
        (wide_second * cos).addcmul_(wide_first, sin, value=sign),
    )
    out[:, :, :num_rotated] = torch.cat(turned, dim=-1)
    return out
