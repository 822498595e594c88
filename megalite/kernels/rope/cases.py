"""Cases of rotary embedding: (samples, positions, heads, rotated heads, head dim)."""

import torch
from torch import Tensor

from megalite.kernels.cases import Case, each, randn
from megalite.kernels.rope import reference
from megalite.kernels.rope.op import rope
from megalite.kernels.rope.tables import frequencies, tables


def make_case(samples: int, seq_len: int, heads: int, rotated: int, head_dim: int, *, dtype: torch.dtype) -> Case:
    """Normal q, k, v and the tables of theta 10000."""
    shape = (samples, seq_len, heads, head_dim)

    def make(generator):
        compute = torch.promote_types(dtype, torch.float32)
        angles = tables(frequencies(head_dim, 10000.0), seq_len, dtype=compute, device=torch.device("cpu"))
        return [randn(shape, dtype, generator)], (*angles, rotated)

    moved = 2 * torch.Size(shape).numel() * dtype.itemsize
    name = "x".join(str(size) for size in (*shape, rotated))
    return Case(name, dtype, make, moved, moved, flops=3 * torch.Size(shape).numel())


def call(qkv: Tensor, cos: Tensor, sin: Tensor, rotated: int, *, impl=reference) -> Tensor:
    """The op."""
    return rope(qkv, cos, sin, num_rotated=rotated, impl=impl)


def truth(qkv: Tensor, cos: Tensor, sin: Tensor, rotated: int) -> Tensor:
    """A product of complex numbers per pair."""
    first, second = qkv[:, :, :rotated].chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.complex(cos.to(qkv.dtype), sin.to(qkv.dtype))[:, None]
    return torch.cat([torch.cat([turned.real, turned.imag], dim=-1), qkv[:, :, rotated:]], dim=2)


CASES = each(make_case, [(1, 1, 3, 2, 2), (2, 5, 4, 3, 6), (2, 16, 8, 6, 32), (1, 33, 3, 3, 8)])
BENCH = each(make_case, [(1, 8192, 12, 10, 128), (1, 8192, 48, 40, 128)], (torch.bfloat16,))
