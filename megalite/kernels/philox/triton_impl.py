"""Philox in Triton: the words of reference.py, bit for bit, and numbers made of them.

The cosine of a word's angle is reduced on the integer, exactly, to a quadrant and |t| <= pi/4, so that no slow path
with a stack is compiled in; the polynomials are fdlibm's (error below one ulp of float64).
Reference: Salmon et al., SC11; fdlibm, k_sin.c and k_cos.c.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels.compile_cases import CompileCase
from megalite.kernels.philox.key import Key

BLOCK, NUM_WARPS = 1024, 4

_EIGHTH, _QUARTER = tl.constexpr(1 << 29), tl.constexpr(1 << 30)
_UNIT, _TURN = tl.constexpr(2.0**-32), tl.constexpr(2.0 * math.pi * 2.0**-32)


@triton.jit
def words(index, key0, key1):
    """Words 0 and 1 (uint32) of the elements `index` (int64); the key's words as 32-bit integers of either sign."""
    low, high = index.to(tl.uint32), (index >> 32).to(tl.uint32)
    zero = low ^ low
    w0, w1, _, _ = tl.philox_impl(low, high, zero, zero, key0.to(tl.uint32), key1.to(tl.uint32))
    return w0, w1


@triton.jit
def _cosine(word):
    """cos(2 pi (word + 0.5) / 2^32) in fp64."""
    quadrant = ((word + _EIGHTH) >> 30) & 3
    rest = (word - quadrant * _QUARTER).to(tl.int32, bitcast=True)
    t = (rest.to(tl.float64) + 0.5) * _TURN
    z = t * t
    sine = 2.75573137070700676789e-06 + z * (-2.50507602534068634195e-08 + z * 1.58969099521155010221e-10)
    sine = 8.33333333332248946124e-03 + z * (-1.98412698298579493134e-04 + z * sine)
    sine = t + t * z * (-1.66666666666666324348e-01 + z * sine)
    cosine = -2.75573143513906633035e-07 + z * (2.08757232129817482790e-09 + z * -1.13596475577881948265e-11)
    cosine = -1.38888888888741095749e-03 + z * (2.48015872894767294178e-05 + z * cosine)
    cosine = 1.0 - (0.5 * z - z * z * (4.16666666666666019037e-02 + z * cosine))
    value = tl.where((quadrant & 1) == 0, cosine, sine)
    return tl.where((quadrant == 1) | (quadrant == 2), -value, value)


@triton.jit(do_not_specialize=["start", "key0", "key1"])
def _normal(out, numel, start, key0, key1, std, BLOCK: tl.constexpr):
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    w0, w1 = words(start + element, key0, key1)
    radius = tl.sqrt(-2.0 * tl.log((w0.to(tl.float64) + 0.5) * _UNIT))
    value = _cosine(w1) * radius * tl.load(std)
    tl.store(out + element, value.to(out.dtype.element_ty), mask=element < numel)


@triton.jit(do_not_specialize=["start", "key0", "key1"])
def _keep(out, numel, start, key0, key1, threshold, BLOCK: tl.constexpr):
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    w0, _ = words(start + element, key0, key1)
    tl.store(out + element, w0.to(tl.int64) >= threshold, mask=element < numel)


def signed(key: Key) -> Key:
    """The key's words as int32, which every launch then passes with one type."""
    return tuple(word - (1 << 32) if word >= 1 << 31 else word for word in key)


def fill_normal(flat: Tensor, key: Key, *, start: int, std: float) -> None:
    """As reference.fill_normal; log and cosine may differ in the last bit of float64."""
    if flat.numel():
        width = flat.new_tensor(std, dtype=torch.float64)  # a float argument would arrive in fp32
        grid = (triton.cdiv(flat.numel(), BLOCK),)
        _normal[grid](flat, flat.numel(), start, *signed(key), width, BLOCK=BLOCK, num_warps=NUM_WARPS)


def fill_keep(flat: Tensor, key: Key, *, start: int, threshold: int) -> None:
    """As reference.fill_keep, bit for bit."""
    if flat.numel():
        grid = (triton.cdiv(flat.numel(), BLOCK),)
        _keep[grid](flat, flat.numel(), start, *signed(key), threshold, BLOCK=BLOCK, num_warps=NUM_WARPS)


def _compile_case(kernel, out: str, **more: str) -> CompileCase:
    signature = {"out": out, "numel": "i64", "start": "i64", "key0": "i32", "key1": "i32"} | more
    return CompileCase(
        kernel,
        name=f"philox{kernel.__name__}/{BLOCK}-{out[1:]}",
        signature=signature,
        constexprs={"BLOCK": BLOCK},
        num_warps=NUM_WARPS,
        attrs=("out",),
        expect={arch: (r"IMAD\.\S*WIDE\.U32|IMAD\.HI\.U32",) for arch in ("sm_80", "sm_90")},
    )


COMPILE = [_compile_case(_normal, "*fp32", std="*fp64"), _compile_case(_keep, "*i1", threshold="i64")]
