"""Sum of squares in Triton, in two stages: partial sums of a fixed number of programs, then their sum.

Invariant: which element is added where depends on the size only, so results are equal between runs and devices. Squares
and sums in fp64, where the square of an fp32 number is exact; the kernel stays bound by memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels.compile_cases import CompileCase

BLOCK, NUM_WARPS = 2048, 8
MAX_PROGRAMS = 1024


@triton.jit
def _partial(out, grad, numel, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float64)
    for low in range(program * BLOCK, numel, tl.num_programs(0) * BLOCK):
        element = low + tl.arange(0, BLOCK)
        x = tl.load(grad + element, mask=element < numel, other=0.0).to(tl.float64)
        total += x * x
    tl.store(out + program, tl.sum(total, 0))


def square_sum(grad: Tensor) -> Tensor:
    """As reference.square_sum; two launches and nothing that waits for the device."""
    grad = grad.contiguous()
    if grad.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=grad.device)
    programs = min(MAX_PROGRAMS, triton.cdiv(grad.numel(), BLOCK))
    partial = torch.empty(programs, dtype=torch.float64, device=grad.device)
    _partial[(programs,)](partial, grad, grad.numel(), BLOCK=BLOCK, num_warps=NUM_WARPS)
    return partial.sum()


def _compile_case(dtype: str) -> CompileCase:
    return CompileCase(
        _partial,
        name=f"grad_norm/{BLOCK}-{dtype}",
        signature={"out": "*fp64", "grad": f"*{dtype}", "numel": "i64"},
        constexprs={"BLOCK": BLOCK},
        num_warps=NUM_WARPS,
        attrs=("grad", "numel"),
        expect={arch: (r"LDG\.E\.\S*128",) for arch in ("sm_80", "sm_90")},
    )


COMPILE = [_compile_case("fp32"), _compile_case("bf16")]
