"""Rotary embedding on the GPU, with the signatures of reference.py: q, k and the v that pass, in one launch.

A program takes a group of heads of one token, so that its angles are read once per group; backward is the same kernel
with the angles negated.
Numerics: computed in the tables' dtype, rounded once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels.compile_cases import ARCHS, CompileCase
from megalite.kernels.tiles import contiguous_columns, power_of_two

MAX_PAIRS = 1024
"""Pairs of elements per program."""


@triton.jit
def rope_rotate(
    x,
    cos,
    sin,
    out,
    S,
    heads,
    half,
    num_rotated,
    stride_b,
    stride_s,
    stride_h,
    INVERSE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    groups = tl.cdiv(heads, HEADS)
    token = (tl.program_id(0) // groups).to(tl.int64)
    head = ((tl.program_id(0) % groups) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    pair = tl.arange(0, BLOCK)
    column = pair[None, :]
    mask = (head < heads) & (column < half)
    position = token % S
    compute = cos.dtype.element_ty
    source = x + (token // S) * stride_b + position * stride_s + head * stride_h + column
    first = tl.load(source, mask=mask, other=0.0)
    second = tl.load(source + half, mask=mask, other=0.0)
    angles = position * half + pair
    c = tl.load(cos + angles, mask=pair < half, other=0.0)[None, :]
    s = tl.load(sin + angles, mask=pair < half, other=0.0)[None, :]
    if INVERSE:
        s = -s
    wide_first, wide_second = first.to(compute), second.to(compute)
    turned_first = (wide_first * c - wide_second * s).to(out.dtype.element_ty)
    turned_second = (wide_second * c + wide_first * s).to(out.dtype.element_ty)
    rotated = head < num_rotated
    target = out + (token * heads + head) * (2 * half) + column
    tl.store(target, tl.where(rotated, turned_first, first), mask=mask)
    tl.store(target + half, tl.where(rotated, turned_second, second), mask=mask)


def forward(qkv: Tensor, cos: Tensor, sin: Tensor, num_rotated: int) -> Tensor:
    """Rotate the first `num_rotated` heads of (B, S, heads, H); a new tensor."""
    return _rotate(qkv, cos, sin, num_rotated, inverse=False)


def backward(dqkv: Tensor, cos: Tensor, sin: Tensor, num_rotated: int) -> Tensor:
    """The inverse rotation of the gradient."""
    return _rotate(dqkv, cos, sin, num_rotated, inverse=True)


def tile(heads: int, half: int) -> tuple[int, int]:
    """Heads and pairs of one program."""
    block = power_of_two(half)
    return max(1, min(power_of_two(heads), MAX_PAIRS // block)), block


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, num_rotated: int, *, inverse: bool) -> Tensor:
    num_samples, seq_len, heads, head_dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        x = contiguous_columns(x)
        group, block = tile(heads, head_dim // 2)
        grid = (num_samples * seq_len * triton.cdiv(heads, group),)
        sizes = (seq_len, heads, head_dim // 2, num_rotated, *x.stride()[:3])
        rope_rotate[grid](x, cos.contiguous(), sin.contiguous(), out, *sizes, INVERSE=inverse, HEADS=group, BLOCK=block)
    return out


def _case(heads: int, half: int, *, inverse: bool) -> CompileCase:
    group, block = tile(heads, half)
    types = {"x": "*bf16", "cos": "*fp32", "sin": "*fp32", "out": "*bf16"}
    divisible = (*types, "half", "stride_b", "stride_s", "stride_h")
    types |= dict.fromkeys(("S", "heads", "half", "num_rotated", "stride_b", "stride_s", "stride_h"), "i32")
    return CompileCase(
        rope_rotate,
        f"rope_{'backward' if inverse else 'forward'}/{heads}x{2 * half}",
        types,
        {"INVERSE": inverse, "HEADS": group, "BLOCK": block},
        num_warps=4,
        attrs=divisible,
        expect={arch: (r"LDG\.E\.128", r"STG\.E\.128") for arch in ARCHS},
    )


COMPILE = [_case(heads, half, inverse=inverse) for heads, half in ((12, 64), (48, 32)) for inverse in (False, True)]
