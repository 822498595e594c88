"""GEMM+AR in Triton, in two shots: as GEMM+RS, but each owner pushes its sum to all ranks; a second kernel collects.

A symmetric buffer (2, W * segment, N) holds partial products, then the sum; segment = ceil(M / W), so that any number
of rows goes, and an owner may have few rows or none. Each element is summed by one rank only: all ranks get its bits.
"""

import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels.compile_cases import CompileCase
from megalite.kernels.gemm_kernels import multiply_segments, product_options, pull_segments, sum_block
from megalite.kernels.gemm_plan import (
    PULLING,
    REDUCE,
    TENSOR_CORES,
    num_processors,
    plan_grid,
    tile_for,
)
from megalite.kernels.gemm_scatter.triton_impl import compile_case
from megalite.kernels.signals.peers import Peers
from megalite.kernels.signals.triton_impl import RESULT, WAITS, set_flag, wait_flag


@triton.jit
def _push_block(pointers, at, total, mask, SIZE: tl.constexpr, ALIGNED: tl.constexpr, element: tl.constexpr):
    for peer in range(SIZE):
        place = tl.load(pointers + peer).to(tl.pointer_type(element))
        if ALIGNED:
            place = tl.multiple_of(place, 16)
        tl.store(place + at, total.to(element), mask=mask)


@triton.jit(do_not_specialize=["rank", "limit", "multiplying"])
def _gemm_all_reduce(
    x,
    weight,
    bias,
    partial,
    staging,
    pointers,
    flags,
    flag_pointers,
    epoch,
    counters,
    errors,
    num_rows,
    segment_rows,
    N,
    K,
    rank,
    limit,
    multiplying,
    SIZE: tl.constexpr,
    NUM_FLAGS: tl.constexpr,
    BIAS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    COMPUTE: tl.constexpr,
    ALIGNED: tl.constexpr,
    MOVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    now = tl.load(epoch)
    program = tl.program_id(0)
    if program < multiplying:
        multiply_segments(
            x, weight, partial, counters, flag_pointers, now, program, multiplying, num_rows, segment_rows, N, K, rank,
            SIZE, NUM_FLAGS, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, COMPUTE,
        )  # fmt: skip
    else:
        worker, workers = program - multiplying, tl.num_programs(0) - multiplying
        stride = segment_rows.to(tl.int64) * N
        start = rank * stride
        length = tl.maximum(tl.minimum(stride, num_rows.to(tl.int64) * N - start), 0)
        late = pull_segments(
            pointers, staging, flags, errors, now, worker, workers, start, length, stride, rank, limit,
            SIZE, NUM_FLAGS, MOVE, ALIGNED,
        )  # fmt: skip
        tl.debug_barrier()
        at = worker * MOVE + tl.arange(0, MOVE).to(tl.int64)
        for _ in range(worker, tl.cdiv(length, MOVE), workers):
            total = late + sum_block(partial + start, staging, bias, at, length, stride, N, rank, SIZE, BIAS, COMPUTE)
            to = (SIZE * stride + start) + at
            _push_block(pointers, to, total, at < length, SIZE, ALIGNED, partial.dtype.element_ty)
            at += workers * MOVE
        tl.debug_barrier()
        if tl.atomic_add(counters + SIZE, 1, sem="acq_rel", scope="sys") == workers - 1:
            for peer in range(SIZE):
                set_flag(flag_pointers, peer, rank, RESULT, now, NUM_FLAGS)


@triton.jit(do_not_specialize=["rank", "limit"])
def _collect(
    result,
    y,
    flags,
    epoch,
    errors,
    length,
    stride,
    rank,
    limit,
    SIZE: tl.constexpr,
    NUM_FLAGS: tl.constexpr,
    MOVE: tl.constexpr,
):
    now = tl.load(epoch)
    failed = tl.load(errors)
    for step in range(SIZE):
        owner = (rank + step) % SIZE
        failed += wait_flag(flags, owner, RESULT, now, errors, rank, limit, NUM_FLAGS)
        start = owner.to(tl.int64) * stride
        end = tl.minimum(start + stride, length)
        at = start + tl.program_id(0) * MOVE + tl.arange(0, MOVE).to(tl.int64)
        for _ in range(tl.program_id(0), tl.cdiv(stride, MOVE), tl.num_programs(0)):
            moved = tl.load(result + at, mask=at < end)
            tl.store(y + at, tl.where(failed == 0, moved, float("nan")).to(moved.dtype), mask=at < end)
            at += tl.num_programs(0) * MOVE


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    buffer: Tensor,
    staging: Tensor,
    pointers: Tensor,
    peers: Peers,
    transposed: bool = False,
) -> Tensor:
    """(M, N): the sum over ranks on every rank; see reference.forward.

    Args:
        x:        (M, K/W) contiguous, any M.
        weight:   (N, K/W), or (K/W, N) if transposed; contiguous.
        buffer:   (2, W * ceil(M / W), N) contiguous, this rank's symmetric buffer of this call.
        staging:  (W - 1, ceil(M / W), N) contiguous, of this rank alone.
        pointers: (W,) int64, the addresses of all ranks' `buffer`.

    Communication: reads (W-1) and writes (W-1) times ceil(M / W) * N elements of peers.
    Numerics: sums in rank order in fp32 (fp64 for fp64) of products rounded to x's dtype; the same bits on all ranks.
    """
    (num_rows, K), (_, segment_rows, N) = x.shape, staging.shape
    y = x.new_empty(num_rows, N)
    tile, pulling = tile_for(REDUCE, x.dtype, x.device), PULLING[x.device.type]
    tiles = peers.size * triton.cdiv(segment_rows, tile.rows) * triton.cdiv(N, tile.columns)
    grid = plan_grid(tiles, processors=num_processors(x.device), tile=tile, pulling=pulling, share=peers.share)
    _gemm_all_reduce[(grid.programs,)](
        x,
        weight,
        bias,
        buffer,
        staging,
        pointers,
        peers.flags,
        peers.flag_pointers,
        peers.epoch,
        peers.counters,
        peers.errors,
        num_rows,
        segment_rows,
        N,
        K,
        peers.rank,
        peers.limit,
        grid.multiplying,
        ALIGNED=segment_rows * N * x.dtype.itemsize % 16 == 0,
        MOVE=tile.move,
        **product_options(x, bias, peers=peers, tile=tile, transposed=transposed),
    )
    _collect_result(buffer[1], y, segment_rows * N, peers=peers, programs=grid.programs)
    return y


def _collect_result(result: Tensor, y: Tensor, stride: int, *, peers: Peers, programs: int) -> None:
    tile = tile_for(REDUCE, y.dtype, y.device)
    _collect[(programs,)](
        result,
        y,
        peers.flags,
        peers.epoch,
        peers.errors,
        y.numel(),
        stride,
        peers.rank,
        peers.limit,
        SIZE=peers.size,
        NUM_FLAGS=peers.flags.shape[1],
        MOVE=tile.move,
        num_warps=tile.num_warps,
    )


def _compile_collect() -> CompileCase:
    signature = {"result": "*bf16", "y": "*bf16"} | dict.fromkeys(("flags", "epoch", "errors"), "*i32")
    signature |= {"length": "i64", "stride": "i32", "rank": "i32", "limit": "i32"}
    tile = REDUCE["sm_90"]
    return CompileCase(
        _collect,
        name="gemm_all_reduce/collect-bf16",
        signature=signature,
        constexprs={"SIZE": 8, "NUM_FLAGS": 64, "MOVE": tile.move},
        num_warps=tile.num_warps,
        attrs=("result", "y", "flags", "epoch", "errors", "stride", "length"),
        expect=dict.fromkeys(("sm_80", "sm_90"), (*WAITS, r"LDG\.E\.128", r"STG\.E\.128")),
    )


COMPILE = [
    compile_case(_gemm_all_reduce, "forward", "bf16", arguments={}, tiles=REDUCE, expect=TENSOR_CORES),
    compile_case(_gemm_all_reduce, "dgrad", "bf16", arguments={}, tiles=REDUCE, expect=TENSOR_CORES),
    _compile_collect(),
]
