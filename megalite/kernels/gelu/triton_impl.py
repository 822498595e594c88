"""GELU (tanh form) on the GPU, with the signatures of reference.py, alone and with the bias add before it.

A program takes one row and one block of columns; in the backward with a bias some rows, whose fp32 sums for the bias it
writes once, and a second stage adds the programs' sums (no atomics: the same bits in each run).
Numerics: fp32 inside (fp64 for fp64). 0.5 (1 + tanh u) is computed as sigmoid(2u), which keeps its relative precision
in the left tail.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels.compile_cases import ARCHS, CompileCase
from megalite.kernels.tiles import as_rows, num_programs, power_of_two

MAX_BLOCK = 1024
PROGRAMS_PER_PROCESSOR = 16


@triton.jit
def _twice_u(x):
    return 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 2 sqrt(2 / pi) (x + 0.044715 x^3)


@triton.jit
def gelu_forward(x, bias, y, F, stride, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    blocks = tl.cdiv(F, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < F
    compute = tl.float64 if y.dtype.element_ty == tl.float64 else tl.float32
    wide = tl.load(x + row * stride + columns, mask=mask, other=0.0).to(compute)
    if BIAS:
        wide += tl.load(bias + columns, mask=mask, other=0.0).to(compute)
    out = wide / (1.0 + tl.exp(-_twice_u(wide)))
    tl.store(y + row * F + columns, out.to(y.dtype.element_ty), mask=mask)


@triton.jit
def gelu_backward(dy, x, bias, dx, dbias, M, F, stride_dy, stride, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    blocks = tl.cdiv(F, BLOCK)
    programs = tl.num_programs(0) // blocks
    program = tl.program_id(0) // blocks
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < F
    compute = dbias.dtype.element_ty
    total = tl.zeros((BLOCK,), compute)
    for i in range(tl.cdiv(M - program, programs)):
        row = program.to(tl.int64) + i * programs
        wide = tl.load(x + row * stride + columns, mask=mask, other=0.0).to(compute)
        grad = tl.load(dy + row * stride_dy + columns, mask=mask, other=0.0).to(compute)
        if BIAS:
            wide += tl.load(bias + columns, mask=mask, other=0.0).to(compute)
        sigmoid = 1.0 / (1.0 + tl.exp(-_twice_u(wide)))
        slope = 1.5957691216057308 * (1.0 + 0.134145 * wide * wide)  # of _twice_u
        out = grad * (sigmoid + wide * sigmoid * (1.0 - sigmoid) * slope)
        tl.store(dx + row * F + columns, out.to(dx.dtype.element_ty), mask=mask)
        total += out
    if BIAS:
        tl.store(dbias + program.to(tl.int64) * F + columns, total, mask=mask)


def forward(x: Tensor) -> Tensor:
    """GELU in x's shape and dtype."""
    return _forward(x, None)


def backward(dy: Tensor, x: Tensor) -> Tensor:
    """dx in x's shape and dtype."""
    return _backward(dy, x, None)[0]


def forward_bias(x: Tensor, bias: Tensor) -> Tensor:
    """GELU of x + bias (F,)."""
    return _forward(x, bias)


def backward_bias(dy: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """dx, dbias (F,) in the compute dtype."""
    dx, sums = _backward(dy, x, bias)
    return dx, sums.sum(0)


def _forward(x: Tensor, bias: Tensor | None) -> Tensor:
    source = as_rows(x)
    rows, width = source.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows:
        block = min(MAX_BLOCK, power_of_two(width))
        grid = (rows * triton.cdiv(width, block),)
        other = source if bias is None else bias
        gelu_forward[grid](source, other, y, width, source.stride(0), BIAS=bias is not None, BLOCK=block)
    return y


def _backward(dy: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    source, grad = as_rows(x), as_rows(dy)
    rows, width = source.shape
    block = min(MAX_BLOCK, power_of_two(width))
    blocks = triton.cdiv(width, block)
    programs = rows
    if bias is not None:
        programs = num_programs(rows, x.device, per_processor=triton.cdiv(PROGRAMS_PER_PROCESSOR, blocks))
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    compute = torch.promote_types(x.dtype, torch.float32)
    sums = torch.empty((0 if bias is None else programs, width), dtype=compute, device=x.device)
    if programs:
        tensors = (grad, source, source if bias is None else bias, dx, sums)
        sizes = (rows, width, grad.stride(0), source.stride(0))
        gelu_backward[(programs * blocks,)](*tensors, *sizes, BIAS=bias is not None, BLOCK=block)
    return dx, sums


def _case(kernel, tensors: tuple[str, ...], whole: tuple[str, ...], *, bias: bool) -> CompileCase:
    types = {name: "*fp32" if name == "dbias" else "*bf16" for name in tensors} | {name: "i32" for name in whole}
    expect = {arch: (r"LDG\.E\.128", r"STG\.E\.128") for arch in ARCHS}
    return CompileCase(
        kernel,
        f"{'bias_' if bias else ''}{kernel.__name__}",
        types,
        {"BIAS": bias, "BLOCK": MAX_BLOCK},
        num_warps=4,
        attrs=tuple(name for name in types if name != "M"),
        expect=expect,
    )


COMPILE = [
    case
    for bias in (False, True)
    for case in (
        _case(gelu_forward, ("x", "bias", "y"), ("F", "stride"), bias=bias),
        _case(gelu_backward, ("dy", "x", "bias", "dx", "dbias"), ("M", "F", "stride_dy", "stride"), bias=bias),
    )
]
