"""Cases of attention: (sequences, positions, q heads, kv heads, head dim, whether rotated, number of documents)."""

import torch
from torch import Tensor

from megalite.kernels.attention import reference
from megalite.kernels.attention.op import attention
from megalite.kernels.cases import Case, each, randn
from megalite.kernels.rope.tables import frequencies, tables

HALF = 2
"""Roundings to a two-byte dtype that the reference may make, e.g. of rotated q and k and of weights."""


def make_case(
    samples: int, seq_len: int, heads: int, kv_heads: int, head_dim: int, *flags: int, dtype: torch.dtype
) -> Case:
    """Normal q, k, v; documents of uneven lengths."""
    rotated, documents = flags
    shape = (samples, seq_len, heads + 2 * kv_heads, head_dim)

    def make(generator):
        compute = torch.promote_types(dtype, torch.float32)
        angles = (None, None)
        if rotated:
            angles = tables(frequencies(head_dim, 10000.0), seq_len, dtype=compute, device=torch.device("cpu"))
        starts = torch.rand(samples, seq_len, generator=generator) * seq_len < documents
        ids = starts.cumsum(1).to(torch.int32) if documents else None
        return [randn(shape, dtype, generator)], (*angles, ids, heads, kv_heads)

    moved = (torch.Size(shape).numel() + samples * seq_len * heads * head_dim) * dtype.itemsize
    flops = 7 * samples * heads * seq_len * seq_len * head_dim  # 2 + 5 products, half of each by causality
    allowed = 16 if dtype.itemsize > 2 else 16 + int(HALF * torch.finfo(dtype).eps / torch.finfo(torch.float32).eps)
    name = "x".join(str(size) for size in (*shape[:2], f"{heads}v{kv_heads}", head_dim, *flags))
    return Case(name, dtype, make, moved, 2 * moved, flops=flops, roundings=allowed)


def call(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    documents: Tensor | None,
    heads: int,
    kv_heads: int,
    *,
    impl=reference,
) -> Tensor:
    """The op."""
    angles = None if cos is None else (cos, sin)
    return attention(qkv, heads=(heads, kv_heads, kv_heads), angles=angles, documents=documents, impl=impl)


def truth(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, documents: Tensor | None, heads: int, kv_heads: int
) -> Tensor:
    """Scores of all pairs, a loop over sequences and heads."""
    rows = []
    for sample in range(qkv.shape[0]):
        mixed = []
        for head in range(heads):
            kv = head * kv_heads // heads
            q, k, v = (qkv[sample, :, index] for index in (head, heads + kv, heads + kv_heads + kv))
            scores = (_turned(q, cos, sin) @ _turned(k, cos, sin).T) / qkv.shape[3] ** 0.5
            seen = torch.ones_like(scores, dtype=torch.bool).tril()
            if documents is not None:
                seen &= documents[sample][:, None] == documents[sample][None]
            mixed.append(torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=1) @ v)
        rows.append(torch.cat(mixed, dim=1))
    return torch.cat(rows)


def _turned(x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    if cos is None:
        return x
    first, second = x.chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.complex(cos.to(x.dtype), sin.to(x.dtype))
    return torch.cat([turned.real, turned.imag], dim=-1)


CASES = each(
    make_case,
    [
        (1, 1, 1, 1, 2, 1, 0),
        (2, 5, 2, 1, 6, 1, 0),
        (2, 17, 4, 2, 16, 1, 3),
        (1, 70, 3, 3, 40, 1, 0),
        (2, 33, 3, 1, 7, 0, 2),
        (1, 130, 2, 2, 32, 0, 0),
    ],
)
BENCH = each(make_case, [(1, 4096, 32, 8, 128, 1, 0), (1, 8192, 8, 8, 128, 1, 0)], (torch.bfloat16,))
