"""The weight gradient in Triton: one program per tile of main, which it reads, adds to and writes once.

Invariant: the sum over rows is in fp32 and in order, and no two programs share an element, so results are
reproducible. Tiles of 128x128x64 with grouped order, so that neighbours share their operands in the L2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels.compile_cases import CompileCase

BLOCK_OUT, BLOCK_IN, BLOCK_ROWS, GROUP = 128, 128, 64, 8
NUM_WARPS, NUM_STAGES = 8, 3
SMALL = 32
"""Block sizes for fp32 factors, whose tiles take twice the shared memory and have no tensor cores."""


@triton.jit
def _accumulate(
    main,
    dy,
    x,
    dy_stride,
    x_stride,
    num_rows,
    num_out,
    num_in,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
):
    tiles_out, tiles_in = tl.cdiv(num_out, BLOCK_OUT), tl.cdiv(num_in, BLOCK_IN)
    program = tl.program_id(0)
    first = (program // (GROUP * tiles_in)) * GROUP
    height = tl.minimum(tiles_out - first, GROUP)
    within = program % (GROUP * tiles_in)
    out = (first + within % height) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    column = (within // height) * BLOCK_IN + tl.arange(0, BLOCK_IN)
    rows = tl.arange(0, BLOCK_ROWS).to(tl.int64)
    dy_place = dy + rows[:, None] * dy_stride + out[None, :]
    x_place = x + rows[:, None] * x_stride + column[None, :]
    total = tl.zeros((BLOCK_OUT, BLOCK_IN), tl.float32)
    for low in range(0, num_rows, BLOCK_ROWS):
        inside = (low + tl.arange(0, BLOCK_ROWS) < num_rows)[:, None]
        left = tl.load(dy_place, mask=inside & (out < num_out)[None, :], other=0.0)
        right = tl.load(x_place, mask=inside & (column < num_in)[None, :], other=0.0)
        total = tl.dot(tl.trans(left), right, total, input_precision="ieee")
        dy_place += BLOCK_ROWS * dy_stride
        x_place += BLOCK_ROWS * x_stride
    place = main + out.to(tl.int64)[:, None] * num_in + column[None, :]
    mask = (out < num_out)[:, None] & (column < num_in)[None, :]
    tl.store(place, tl.load(place, mask=mask, other=0.0) + total, mask=mask)


def accumulate(main: Tensor, dy: Tensor, x: Tensor) -> None:
    """As reference.accumulate, for fp32 main and equal dtypes of dy and x up to 32 bits.

    Raises:
        ValueError: other dtypes, or main is not contiguous.
    """
    if not main.is_contiguous():
        raise ValueError(f"main gradient {tuple(main.shape)} has strides {main.stride()}; it must be contiguous")
    if main.dtype != torch.float32 or dy.dtype != x.dtype or dy.dtype.itemsize > 4:
        raise ValueError(f"wgrad in Triton adds into fp32, not {dy.dtype} and {x.dtype} into {main.dtype}")
    num_rows, num_out, num_in = *dy.shape, x.shape[1]
    if 0 in (num_rows, num_out, num_in):
        return
    dy, x = (t if t.stride(1) == 1 else t.contiguous() for t in (dy, x))
    blocks = _blocks(dy.dtype.itemsize == 2)
    grid = (triton.cdiv(num_out, blocks["BLOCK_OUT"]) * triton.cdiv(num_in, blocks["BLOCK_IN"]),)
    _accumulate[grid](
        main,
        dy,
        x,
        dy.stride(0),
        x.stride(0),
        num_rows,
        num_out,
        num_in,
        **blocks,
        num_warps=NUM_WARPS if dy.dtype.itemsize == 2 else 4,
        num_stages=NUM_STAGES,
    )


def _blocks(narrow: bool) -> dict[str, int]:
    sizes = (BLOCK_OUT, BLOCK_IN, BLOCK_ROWS) if narrow else (2 * SMALL, 2 * SMALL, SMALL)
    return dict(zip(("BLOCK_OUT", "BLOCK_IN", "BLOCK_ROWS"), sizes, strict=True)) | {"GROUP": GROUP}


_TENSOR_CORES = {"sm_80": (r"HMMA", r"LDGSTS"), "sm_90": (r"HGMMA", r"LDGSTS")}


def _compile_case(dtype: str) -> CompileCase:
    narrow = dtype != "fp32"
    signature = {"main": "*fp32", "dy": f"*{dtype}", "x": f"*{dtype}"}
    signature |= {"dy_stride": "i64", "x_stride": "i64", "num_rows": "i32", "num_out": "i32", "num_in": "i32"}
    blocks = _blocks(narrow)
    return CompileCase(
        _accumulate,
        name=f"wgrad/{blocks['BLOCK_OUT']}x{blocks['BLOCK_IN']}x{blocks['BLOCK_ROWS']}-{dtype}",
        signature=signature,
        constexprs=blocks,
        num_warps=NUM_WARPS if narrow else 4,
        num_stages=NUM_STAGES,
        attrs=tuple(signature),
        expect=_TENSOR_CORES if narrow else {},
    )


COMPILE = [_compile_case("bf16"), _compile_case("fp32")]
