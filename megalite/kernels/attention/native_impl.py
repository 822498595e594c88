"""Attention on the CPU in C++ (csrc/attention_cpu.cpp): one pass over the packed heads, rotation and masks included.

Numerics: fp32 inside, rounded once; every vector level and number of threads gives the same bits.
Memory: keeps qkv and one number per row and head, neither rotated heads nor weights.
"""

import torch
from torch import Tensor

from megalite import native
from megalite.kernels.native_calls import as_table, how
from megalite.kernels.native_calls import problem as problem_of_native
from megalite.kernels.tiles import contiguous_columns

__all__ = ["attend", "backward", "forward", "problem"]

ROTATES = True
Angles = tuple[Tensor, Tensor] | None


def problem(device: torch.device, dtype: torch.dtype) -> str:
    """Why it can't run on this device in this compute dtype, or nothing."""
    reason = problem_of_native(device, dtype)
    if not reason and native.load().simd_level() == 0:
        return "its products are slower than torch's on a CPU without AVX2"
    return reason


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, heads, angles, documents):
        mixed, log_sums = forward(qkv, heads, angles, documents)
        ctx.save_for_backward(qkv, log_sums)
        ctx.heads, ctx.angles, ctx.documents = heads, angles, documents
        return mixed

    @staticmethod
    def backward(ctx, dmixed):
        return backward(dmixed, *ctx.saved_tensors, ctx.heads, ctx.angles, ctx.documents), None, None, None


def attend(qkv: Tensor, heads: tuple[int, int, int], angles: Angles, documents: Tensor | None, rope) -> Tensor:
    """See op.attention; `rope` is not needed."""
    return _Attention.apply(qkv, heads, angles, documents)


def forward(
    qkv: Tensor, heads: tuple[int, int, int], angles: Angles, documents: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Mixed rows (B * S, N * H), and (B, N, S) fp32: log2 of the sum of exp(scores) of each row and head."""
    num_samples, seq_len, _, head_dim = qkv.shape
    mixed = torch.empty(num_samples * seq_len, heads[0] * head_dim, dtype=qkv.dtype)
    log_sums = torch.empty(num_samples, heads[0], seq_len, dtype=torch.float32)
    _call(qkv, None, heads, angles, documents, (log_sums, mixed))
    return mixed, log_sums


def backward(
    dmixed: Tensor, qkv: Tensor, log_sums: Tensor, heads: tuple[int, int, int], angles: Angles, documents: Tensor | None
) -> Tensor:
    """d(qkv), a new tensor."""
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype)
    _call(qkv, contiguous_columns(dmixed), heads, angles, documents, (log_sums, dqkv))
    return dqkv


def _call(
    qkv: Tensor,
    dmixed: Tensor | None,
    heads: tuple[int, int, int],
    angles: Angles,
    documents: Tensor | None,
    outputs: tuple[Tensor, Tensor],
) -> None:
    """Forward without dmixed, else backward."""
    qkv = contiguous_columns(qkv)
    num_samples, seq_len, _, head_dim = qkv.shape
    tables = () if angles is None else (as_table(angles[0]), as_table(angles[1]))
    documents = None if documents is None else documents.to(torch.int32).contiguous()
    native.load().attention(
        (qkv.data_ptr(), *qkv.stride()[:3]),
        tuple(table.data_ptr() for table in tables) or (0, 0),
        0 if documents is None else documents.data_ptr(),
        (0, 0) if dmixed is None else (dmixed.data_ptr(), dmixed.stride(0)),
        (outputs[0].data_ptr(), outputs[1].data_ptr()),
        (num_samples, seq_len, heads[0], heads[1], head_dim),
        head_dim**-0.5,
        **(how(qkv) if dmixed is None else how(qkv, dmixed)),
    )
