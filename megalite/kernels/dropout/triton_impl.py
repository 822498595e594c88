"""Dropout in Triton: the mask lives in registers; backward draws it again from the counters. Bit-equal masks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels.compile_cases import CompileCase
from megalite.kernels.dropout.mask import keep_threshold
from megalite.kernels.philox import Key
from megalite.kernels.philox.triton_impl import signed, words

BLOCK, NUM_WARPS = 1024, 4


@triton.jit(do_not_specialize=["start", "key0", "key1", "threshold", "scale"])
def _apply(y, x, numel, start, key0, key1, threshold, scale, BLOCK: tl.constexpr):
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < numel
    w0, _ = words(start + element, key0, key1)
    value = tl.load(x + element, mask=inside).to(tl.float32) * scale
    kept = w0.to(tl.int64) >= threshold
    tl.store(y + element, tl.where(kept, value, 0.0).to(y.dtype.element_ty), mask=inside)


def forward(x: Tensor, *, p: float, key: Key, starts: tuple[int, ...]) -> Tensor:
    """As reference.forward; one launch per run."""
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel() == 0:
        return y
    for source, target, start in zip(x.chunk(len(starts)), y.chunk(len(starts)), starts, strict=True):
        numel = source.numel()
        threshold, scale = keep_threshold(p), 1.0 / (1.0 - p)
        _apply[(triton.cdiv(numel, BLOCK),)](
            target, source, numel, start, *signed(key), threshold, scale, BLOCK=BLOCK, num_warps=NUM_WARPS
        )
    return y


def backward(dy: Tensor, *, p: float, key: Key, starts: tuple[int, ...]) -> Tensor:
    """The gradient of forward, the same map."""
    return forward(dy, p=p, key=key, starts=starts)


def _compile_case(dtype: str) -> CompileCase:
    numbers = {"numel": "i64", "start": "i64", "key0": "i32", "key1": "i32", "threshold": "i64", "scale": "fp32"}
    return CompileCase(
        _apply,
        name=f"dropout/{BLOCK}-{dtype}",
        signature={"y": f"*{dtype}", "x": f"*{dtype}"} | numbers,
        constexprs={"BLOCK": BLOCK},
        num_warps=NUM_WARPS,
        attrs=("x", "y", "numel"),
        expect={arch: (r"LDG\.E\.\S*(128|64)",) for arch in ("sm_80", "sm_90")},
    )


COMPILE = [_compile_case("bf16"), _compile_case("fp32")]
