"""Cross entropy in Triton: one pass for the statistics of a row, one that overwrites the logits with their gradient.

Invariant: each logit is read once per pass. Loads are masked by the number of columns, which divides well, so that they
stay 16 bytes wide; padding is taken out afterwards. Row offsets are int64: M * columns passes 2^31. fp32 inside (the
dtype of the statistics).
Reference: Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.batch import IGNORE
from megalite.kernels.compile_cases import CompileCase

STATISTICS_BLOCK, GRADIENT_BLOCK = 8192, 4096
NUM_WARPS = 8

_SKIP = tl.constexpr(IGNORE)


@triton.jit(do_not_specialize=["start"])
def _statistics(out, logits, targets, stride, num_rows, start, num_columns, num_valid, BLOCK: tl.constexpr):
    compute = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * stride
    largest = tl.full((), float("-inf"), compute)
    total = tl.zeros((), compute)
    for low in range(0, num_valid, BLOCK):
        columns = low + tl.arange(0, BLOCK)
        x = tl.load(line + columns, mask=columns < num_columns).to(compute)
        x = tl.where(columns < num_valid, x, float("-inf"))
        new = tl.maximum(largest, tl.max(x, 0))
        shift = tl.where(new == float("-inf"), 0.0, new)  # else -inf - -inf
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(x - shift), 0)
        largest = new
    local = tl.load(targets + row) - start
    target = tl.load(line + local, mask=(local >= 0) & (local < num_valid), other=0.0).to(compute)
    tl.store(out + row, largest)
    tl.store(out + num_rows + row, total)
    tl.store(out + 2 * num_rows + row, target)


@triton.jit(do_not_specialize=["start"])
def _gradient(
    logits,
    dloss,
    normalizer,
    targets,
    stride,
    dloss_stride,
    normalizer_stride,
    start,
    num_columns,
    num_valid,
    BLOCK: tl.constexpr,
):
    compute = normalizer.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    scale = tl.load(dloss + row * dloss_stride).to(compute)
    scale = tl.where(target == _SKIP, 0.0, scale)
    largest = tl.load(normalizer + row)
    factor = scale / tl.load(normalizer + normalizer_stride + row)
    place = logits + row * stride + columns
    x = tl.load(place, mask=columns < num_columns).to(compute)
    x = tl.where(columns < num_valid, x, float("-inf"))
    grad = tl.exp(x - largest) * factor - tl.where(columns == target - start, scale, 0.0)
    grad = tl.where(columns < num_valid, grad, 0.0)  # a target of another slice may point into the padding
    tl.store(place, grad.to(logits.dtype.element_ty), mask=columns < num_columns)


def statistics(logits: Tensor, targets: Tensor, *, start: int, num_valid: int) -> Tensor:
    """As reference.statistics; the columns of a row are contiguous, rows may have any stride."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows, num_columns = logits.shape
    compute = torch.promote_types(logits.dtype, torch.float32)
    out = torch.empty(3, num_rows, dtype=compute, device=logits.device)
    if num_rows:
        block = min(STATISTICS_BLOCK, triton.next_power_of_2(max(1, num_valid)))
        _statistics[(num_rows,)](
            out,
            logits,
            targets.contiguous(),
            logits.stride(0),
            num_rows,
            start,
            num_columns,
            num_valid,
            BLOCK=block,
            num_warps=NUM_WARPS,
        )
    return out


def backward(
    dloss: Tensor, logits: Tensor, normalizer: Tensor, targets: Tensor, *, start: int, num_valid: int
) -> Tensor:
    """As reference.backward.

    Raises:
        ValueError: the columns of a row are not contiguous, so a copy would receive the gradient.
    """
    num_rows, num_columns = logits.shape
    if logits.numel() == 0:
        return logits
    if logits.stride(1) != 1:
        raise ValueError(f"cross_entropy logits have strides {logits.stride()}; pass logits.contiguous()")
    normalizer = normalizer if normalizer.stride(1) == 1 else normalizer.contiguous()
    block = min(GRADIENT_BLOCK, triton.next_power_of_2(num_columns))
    _gradient[(num_rows, triton.cdiv(num_columns, block))](
        logits,
        dloss,
        normalizer,
        targets.contiguous(),
        logits.stride(0),
        dloss.stride(0),
        normalizer.stride(0),
        start,
        num_columns,
        num_valid,
        BLOCK=block,
        num_warps=NUM_WARPS,
    )
    return logits


_WIDE_LOADS = {"sm_80": (r"LDG\.E\.\S*128",), "sm_90": (r"LDG\.E\.\S*128",)}


def _compile_cases(dtype: str) -> list[CompileCase]:
    sizes = {"stride": "i64", "start": "i32", "num_columns": "i32", "num_valid": "i32"}
    read = {"out": "*fp32", "logits": f"*{dtype}", "targets": "*i64", "num_rows": "i32"}
    write = {"logits": f"*{dtype}", "dloss": "*fp32", "normalizer": "*fp32", "targets": "*i64"}
    write |= {"dloss_stride": "i32", "normalizer_stride": "i32"}
    aligned = ("logits", "stride", "num_columns")
    return [
        CompileCase(
            kernel,
            name=f"cross_entropy{kernel.__name__}/{block}-{dtype}",
            signature=pointers | sizes,
            constexprs={"BLOCK": block},
            num_warps=NUM_WARPS,
            attrs=aligned,
            expect=_WIDE_LOADS,
        )
        for kernel, pointers, block in ((_statistics, read, STATISTICS_BLOCK), (_gradient, write, GRADIENT_BLOCK))
    ]


COMPILE = [case for dtype in ("bf16", "fp32") for case in _compile_cases(dtype)]
