"""Causal attention of each sequence by itself, from the packed projection to the rows that are projected back.

An implementation is a module with a differentiable `attend` as in reference.py: libraries of attention kernels bring
their own backward. One that sets ROTATES turns q and k itself and leaves `rope` alone.
"""

from collections.abc import Sequence
from types import ModuleType

from torch import Tensor

from megalite.kernels.attention import reference
from megalite.kernels.rope import reference as rope_reference
from megalite.kernels.rope.op import check_angles, check_heads


def attention(
    qkv: Tensor,
    *,
    heads: Sequence[int],
    angles: tuple[Tensor, Tensor] | None = None,
    documents: Tensor | None = None,
    impl: ModuleType = reference,
    rope: ModuleType = rope_reference,
) -> Tensor:
    """softmax(q k^T / sqrt(H)) v, where a position sees itself and what stands before it.

    Args:
        qkv:       (B, S, heads, H), q heads first, then k, then v; query head i reads kv head i * K // N.
        heads:     how many are q, k and v: (N, K, K).
        angles:    cos and sin, (S, H/2) each, if q and k are to be rotated.
        documents: (B, S) integers that rise along a sequence: a position then sees its own document only.
        rope:      an implementation of kernels.rope, for those that do not rotate by themselves.

    Returns:
        (B * S, N * H).

    Raises:
        ValueError: sizes that do not fit each other.
    """
    num_heads, num_kv_heads, _ = check_heads(heads, qkv)
    if num_kv_heads < 1 or num_heads % num_kv_heads or heads[1] != heads[2]:
        raise ValueError(f"heads={tuple(heads)} must be N, K and K with K dividing N")
    if angles is not None:
        check_angles(qkv, *angles)
    if documents is not None and documents.shape != qkv.shape[:2]:
        raise ValueError(f"documents {tuple(documents.shape)} must be {tuple(qkv.shape[:2])}, as the sequences are")
    return impl.attend(qkv, tuple(heads), angles, documents, rope)
