"""Triton kernels of RMSNorm and LayerNorm, with the residual add before them; RMSNorm is the case without CENTER.

Forward: one row per program, read once. Backward: persistent programs, each keeps fp32 sums for the parameters in
registers and writes them once, a second stage adds the programs' sums: no atomics, the same bits in each run. Rows too
wide for the registers take two kernels: the rows' gradient in two passes, the parameters' by blocks of columns.
Numerics: fp32 inside (fp64 for fp64). The sum is rounded to its dtype before it is normalised, since backward reads it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels.compile_cases import ARCHS, CompileCase
from megalite.kernels.tiles import contiguous_columns, num_programs, power_of_two

MAX_WIDTH = 32768
MAX_PERSISTENT = {False: 16384, True: 8192}
"""Widest row of the persistent backward, by CENTER; a wider one would spill."""
MAX_LOADED_ONCE = 8192
"""Widest row that the persistent backward keeps in registers over its reductions; a wider one it reads again."""
WIDE_BLOCK = 4096
WIDE_CONFIG = {"BLOCK": WIDE_BLOCK, "num_warps": 8}
"""Of the kernels that go over a row in blocks."""


@triton.jit
def norm_forward(
    x,
    residual,
    weight,
    bias,
    y,
    total,
    mean,
    rstd,
    D,
    stride_x,
    stride_residual,
    EPS: tl.constexpr,
    CENTER: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < D
    compute = rstd.dtype.element_ty
    wide = tl.load(x + row * stride_x + columns, mask=mask, other=0.0).to(compute)
    if RESIDUAL:
        wide += tl.load(residual + row * stride_residual + columns, mask=mask, other=0.0).to(compute)
        rounded = wide.to(total.dtype.element_ty)
        tl.store(total + row * D + columns, rounded, mask=mask)
        wide = rounded.to(compute)
    if CENTER:
        middle = tl.sum(wide, 0) / D
        tl.store(mean + row, middle)
        wide = tl.where(mask, wide - middle, 0.0)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / D + EPS)
    tl.store(rstd + row, inverse)
    normed = wide * inverse * tl.load(weight + columns, mask=mask, other=0.0).to(compute)
    if CENTER:
        normed += tl.load(bias + columns, mask=mask, other=0.0).to(compute)
    tl.store(y + row * D + columns, normed.to(y.dtype.element_ty), mask=mask)


@triton.jit
def norm_backward(
    dy,
    dtotal,
    x,
    weight,
    mean,
    rstd,
    dx,
    dweight,
    dbias,
    M,
    D,
    stride_dy,
    stride_dtotal,
    stride_x,
    CENTER: tl.constexpr,
    RESIDUAL: tl.constexpr,
    RELOAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < D
    compute = rstd.dtype.element_ty
    sum_weight = tl.zeros((BLOCK,), compute)
    sum_bias = tl.zeros((BLOCK,), compute)
    for i in range(tl.cdiv(M - tl.program_id(0), programs)):
        row = program + i * programs
        grad = tl.load(dy + row * stride_dy + columns, mask=mask, other=0.0).to(compute)
        normed = tl.load(x + row * stride_x + columns, mask=mask, other=0.0).to(compute)
        inverse = tl.load(rstd + row)
        middle = tl.load(mean + row) if CENTER else 0.0
        normed = (normed - middle) * inverse  # not zero beyond D, but grad is
        scaled = grad * tl.load(weight + columns, mask=mask, other=0.0).to(compute)
        slope = tl.sum(scaled * normed, 0) / D
        level = tl.sum(scaled, 0) / D if CENTER else 0.0
        if RELOAD:  # from the cache: fewer registers are alive during the reductions; the policy keeps the loads apart
            grad = tl.load(dy + row * stride_dy + columns, mask=mask, other=0.0, eviction_policy="evict_first")
            normed = tl.load(x + row * stride_x + columns, mask=mask, other=0.0, eviction_policy="evict_first")
            scale = tl.load(weight + columns, mask=mask, other=0.0, eviction_policy="evict_last")
            grad = grad.to(compute)
            normed = (normed.to(compute) - middle) * inverse
            scaled = grad * scale.to(compute)
        out = scaled - normed * slope - level
        if CENTER:
            sum_bias += grad
        sum_weight += grad * normed
        out *= inverse
        if RESIDUAL:
            out += tl.load(dtotal + row * stride_dtotal + columns, mask=mask, other=0.0).to(compute)
        tl.store(dx + row * D + columns, out.to(dx.dtype.element_ty), mask=mask)
    tl.store(dweight + program * D + columns, sum_weight, mask=mask)
    if CENTER:
        tl.store(dbias + program * D + columns, sum_bias, mask=mask)


@triton.jit
def norm_backward_rows(
    dy,
    dtotal,
    x,
    weight,
    mean,
    rstd,
    dx,
    D,
    stride_dy,
    stride_dtotal,
    stride_x,
    CENTER: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    compute = rstd.dtype.element_ty
    inverse = tl.load(rstd + row)
    middle = tl.load(mean + row) if CENTER else 0.0
    products = tl.zeros((BLOCK,), compute)
    plain = tl.zeros((BLOCK,), compute)
    for start in range(0, D, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < D
        normed = (tl.load(x + row * stride_x + columns, mask=mask, other=0.0).to(compute) - middle) * inverse
        scaled = tl.load(dy + row * stride_dy + columns, mask=mask, other=0.0).to(compute)
        scaled *= tl.load(weight + columns, mask=mask, other=0.0).to(compute)
        products += scaled * normed
        plain += scaled
    slope = tl.sum(products, 0) / D
    level = tl.sum(plain, 0) / D if CENTER else 0.0
    for start in range(0, D, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < D
        normed = (tl.load(x + row * stride_x + columns, mask=mask, other=0.0).to(compute) - middle) * inverse
        scaled = tl.load(dy + row * stride_dy + columns, mask=mask, other=0.0).to(compute)
        scaled *= tl.load(weight + columns, mask=mask, other=0.0).to(compute)
        out = (scaled - normed * slope - level) * inverse
        if RESIDUAL:
            out += tl.load(dtotal + row * stride_dtotal + columns, mask=mask, other=0.0).to(compute)
        tl.store(dx + row * D + columns, out.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def norm_backward_params(
    dy,
    x,
    mean,
    rstd,
    dweight,
    dbias,
    M,
    D,
    stride_dy,
    stride_x,
    CENTER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < D
    compute = rstd.dtype.element_ty
    sum_weight = tl.zeros((BLOCK,), compute)
    sum_bias = tl.zeros((BLOCK,), compute)
    for i in range(tl.cdiv(M - tl.program_id(0), programs)):
        row = program + i * programs
        grad = tl.load(dy + row * stride_dy + columns, mask=mask, other=0.0).to(compute)
        normed = tl.load(x + row * stride_x + columns, mask=mask, other=0.0).to(compute)
        if CENTER:
            normed -= tl.load(mean + row)
            sum_bias += grad
        sum_weight += grad * (normed * tl.load(rstd + row))
    tl.store(dweight + program * D + columns, sum_weight, mask=mask)
    if CENTER:
        tl.store(dbias + program * D + columns, sum_bias, mask=mask)


def forward_config(width: int) -> dict[str, Any]:
    """Block and warps of the forward kernel."""
    block = power_of_two(width)
    return {"BLOCK": block, "num_warps": min(32, max(4, block // 1024))}


def backward_config(width: int) -> dict[str, Any]:
    """Block and warps of the persistent backward kernel."""
    block = power_of_two(width)
    reload = block > MAX_LOADED_ONCE
    return {"BLOCK": block, "RELOAD": reload, "num_warps": 16 if reload else max(4, block // 512)}


def run_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, what was normalised (x itself without a residual), mean and rstd (M, 1); the mean is LayerNorm's (with a
    bias)."""
    rows, width = x.shape
    if width > MAX_WIDTH:
        way_out = "use kernels.rmsnorm=reference, kernels.layernorm=reference"
        raise ValueError(f"rows of {width} elements: the Triton norms take at most {MAX_WIDTH}; {way_out}")
    x = contiguous_columns(x)
    other = x if residual is None else contiguous_columns(residual)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    center = bias is not None
    compute = torch.promote_types(x.dtype, torch.float32)
    numbers = torch.empty((1 + center, rows, 1), dtype=compute, device=x.device)
    mean, rstd = numbers[0], numbers[-1]
    if rows:
        tensors = (x, other, weight, bias if center else weight, y, total, mean, rstd)
        flags = {"EPS": eps, "CENTER": center, "RESIDUAL": residual is not None}
        norm_forward[(rows,)](*tensors, width, x.stride(0), other.stride(0), **flags, **forward_config(width))
    return y, total, mean, rstd


def run_backward(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dx in x's dtype, with the gradient of the sum added; dweight and dbias in rstd's dtype; x is what was normalised.

    Without `mean` it is RMSNorm, and the last is not a gradient.
    """
    rows, width = x.shape
    dy, x = contiguous_columns(dy), contiguous_columns(x)
    other = dy if dtotal is None else contiguous_columns(dtotal)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    center = mean is not None
    wide = width > MAX_PERSISTENT[center]
    config = WIDE_CONFIG if wide else backward_config(width)
    programs = num_programs(rows, x.device, per_processor=max(1, 16 // config["num_warps"]))
    sums = torch.empty((1 + center, programs, width), dtype=rstd.dtype, device=x.device)
    middle = mean if center else rstd
    inputs = (dy, other, x, weight, middle, rstd, dx)
    strides = (dy.stride(0), other.stride(0), x.stride(0))
    flags = {"CENTER": center, "RESIDUAL": dtotal is not None}
    if not wide:
        norm_backward[(programs,)](*inputs, sums[0], sums[-1], rows, width, *strides, **flags, **config)
    else:
        grid = (programs, triton.cdiv(width, WIDE_BLOCK))
        inputs_of_params = (dy, x, middle, rstd, sums[0], sums[-1], rows, width, dy.stride(0), x.stride(0))
        norm_backward_params[grid](*inputs_of_params, CENTER=center, **config)
        if rows:
            norm_backward_rows[(rows,)](*inputs, width, *strides, **flags, **config)
    dparams = sums.sum(1)
    return dx, dparams[0], dparams[-1]


def compile_cases(op: str, *, center: bool) -> list[CompileCase]:
    """What `op` launches, with and without a residual, at the widths of GPT models."""
    found = []
    for width in (4096, 8192, 16384, 25600):
        for residual in (False, True):
            name = f"{op}{'_residual' if residual else ''}"
            flags = {"CENTER": center, "RESIDUAL": residual}
            wide = width > MAX_PERSISTENT[center]
            found.append(_case(norm_forward, f"{name}_forward/{width}", {"EPS": 1e-5, **flags}, forward_config(width)))
            backward = (norm_backward_rows, WIDE_CONFIG) if wide else (norm_backward, backward_config(width))
            found.append(_case(backward[0], f"{name}_backward/{width}", flags, backward[1]))
        if wide:
            found.append(_case(norm_backward_params, f"{op}_backward_params/{width}", {"CENTER": center}, WIDE_CONFIG))
    return found


def _case(kernel: Any, name: str, flags: dict[str, Any], config: dict[str, Any]) -> CompileCase:
    wide = {"mean", "rstd", "dweight", "dbias"}
    whole = {"D", "M", "stride_x", "stride_residual", "stride_dy", "stride_dtotal"}
    arguments = [argument for argument in kernel.arg_names if argument.islower() or argument in ("D", "M")]
    types = {a: "i32" if a in whole else "*fp32" if a in wide else "*bf16" for a in arguments}
    return CompileCase(
        kernel,
        name,
        types,
        flags | {name: value for name, value in config.items() if name != "num_warps"},
        num_warps=config["num_warps"],
        attrs=tuple(a for a in arguments if a != "M"),
        expect={arch: (r"LDG\.E\.128",) for arch in ARCHS},
    )
