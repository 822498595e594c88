"""SwiGLU on the GPU, with the signatures of reference.py: one program per row and block of columns.

Numerics: fp32 inside (fp64 for fp64).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels.compile_cases import ARCHS, CompileCase
from megalite.kernels.tiles import as_rows, power_of_two

MAX_BLOCK = 1024


@triton.jit
def swiglu_forward(gate_up, y, F, stride, BLOCK: tl.constexpr):
    blocks = tl.cdiv(F, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < F
    compute = tl.float64 if y.dtype.element_ty == tl.float64 else tl.float32
    source = gate_up + row * stride + columns
    gate = tl.load(source, mask=mask, other=0.0).to(compute)
    up = tl.load(source + F, mask=mask, other=0.0).to(compute)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y + row * F + columns, out.to(y.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_backward(dy, gate_up, dgate_up, F, stride_dy, stride, BLOCK: tl.constexpr):
    blocks = tl.cdiv(F, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < F
    compute = tl.float64 if dgate_up.dtype.element_ty == tl.float64 else tl.float32
    source = gate_up + row * stride + columns
    target = dgate_up + row * (2 * F) + columns
    gate = tl.load(source, mask=mask, other=0.0).to(compute)
    up = tl.load(source + F, mask=mask, other=0.0).to(compute)
    grad = tl.load(dy + row * stride_dy + columns, mask=mask, other=0.0).to(compute)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    dgate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    dup = grad * gate * sigmoid
    tl.store(target, dgate.to(dgate_up.dtype.element_ty), mask=mask)
    tl.store(target + F, dup.to(dgate_up.dtype.element_ty), mask=mask)


def forward(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: (M, 2F) -> (M, F)."""
    source = as_rows(gate_up)
    rows, width = source.shape[0], source.shape[1] // 2
    y = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = min(MAX_BLOCK, power_of_two(width))
        swiglu_forward[(rows * triton.cdiv(width, block),)](source, y, width, source.stride(0), BLOCK=block)
    return y


def backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """d(gate_up) (M, 2F), a new tensor."""
    source, grad = as_rows(gate_up), as_rows(dy)
    rows, width = grad.shape
    out = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = min(MAX_BLOCK, power_of_two(width))
        strides = (grad.stride(0), source.stride(0))
        swiglu_backward[(rows * triton.cdiv(width, block),)](grad, source, out, width, *strides, BLOCK=block)
    return out


def _case(kernel, tensors: tuple[str, ...], whole: tuple[str, ...]) -> CompileCase:
    types = {name: "*bf16" for name in tensors} | {name: "i32" for name in whole}
    expect = {arch: (r"LDG\.E\.128", r"STG\.E\.128") for arch in ARCHS}
    return CompileCase(
        kernel, kernel.__name__, types, {"BLOCK": MAX_BLOCK}, num_warps=4, attrs=tuple(types), expect=expect
    )


COMPILE = [
    _case(swiglu_forward, ("gate_up", "y"), ("F", "stride")),
    _case(swiglu_backward, ("dy", "gate_up", "dgate_up"), ("F", "stride_dy", "stride")),
]
