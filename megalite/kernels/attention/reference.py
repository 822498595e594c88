"""Attention by torch: scaled_dot_product_attention, which is fused on GPUs and on the CPU where there is no mask.

It computes in the inputs' dtype as torch does; in bf16 it rounds the weights.
"""

import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.rope.op import split_heads


def attend(
    qkv: Tensor, heads: tuple[int, int, int], angles: tuple[Tensor, Tensor] | None, documents: Tensor | None, rope
) -> Tensor:
    """See op.attention."""
    q, k, v = split_heads(qkv, heads=heads, angles=angles, impl=rope)
    mask = None if documents is None else document_mask(documents)
    grouped = heads[0] != heads[1]
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    return mixed.transpose(1, 2).reshape(qkv.shape[0] * qkv.shape[1], heads[0] * qkv.shape[3])


def document_mask(documents: Tensor) -> Tensor:
    """(B, 1, S, S) bool: a position sees earlier positions of its own document, and itself."""
    same = documents[:, :, None] == documents[:, None, :]
    return same.tril_()[:, None]
