"""GEMM+RS in Triton, in one launch: most programs multiply, a few pull the peers' finished segments and sum them.

Multiplying programs store tiles into the local symmetric buffer, owner rank + 1 first and the own segment last, and
never wait. Pulling programs copy each peer's segment for this rank as it becomes ready, and sum at the end in rank
order, whatever the order of arrival.
Reference: Flux, arXiv:2406.06858; local stores and a pull keep remote latency out of the GEMM's epilogue.
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
    WIDE,
    Tile,
    launches,
    num_processors,
    plan_grid,
    tile_for,
)
from megalite.kernels.signals.peers import Peers
from megalite.kernels.signals.triton_impl import SIGNALS, WAITS


@triton.jit(do_not_specialize=["rank", "limit", "multiplying"])
def _gemm_scatter(
    x,
    weight,
    bias,
    partial,
    staging,
    y,
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
        length = segment_rows.to(tl.int64) * N
        start = rank * length
        late = pull_segments(
            pointers, staging, flags, errors, now, worker, workers, start, length, length, rank, limit,
            SIZE, NUM_FLAGS, MOVE, ALIGNED,
        )  # fmt: skip
        tl.debug_barrier()
        at = worker * MOVE + tl.arange(0, MOVE).to(tl.int64)
        for _ in range(worker, tl.cdiv(length, MOVE), workers):
            total = late + sum_block(partial + start, staging, bias, at, length, length, N, rank, SIZE, BIAS, COMPUTE)
            tl.store(y + at, total.to(y.dtype.element_ty), mask=at < length)
            at += workers * MOVE


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
    """(M/W, N): this rank's rows of the sum over ranks; see reference.forward.

    Args:
        x:        (M, K/W) contiguous, with M divisible by the number of ranks.
        weight:   (N, K/W), or (K/W, N) if transposed; contiguous.
        buffer:   (M, N) contiguous, this rank's symmetric buffer of this call.
        staging:  (W - 1, M/W, N) contiguous, of this rank alone.
        pointers: (W,) int64, the addresses of all ranks' `buffer`.

    Communication: reads (W-1) * M/W * N elements of peers.
    Numerics: sums in rank order in fp32 (fp64 for fp64) of products rounded to x's dtype.
    """
    (num_rows, K), N = x.shape, buffer.shape[1]
    rows = num_rows // peers.size
    y = x.new_empty(rows, N)
    tile, pulling = tile_for(REDUCE, x.dtype, x.device), PULLING[x.device.type]
    tiles = peers.size * triton.cdiv(rows, tile.rows) * triton.cdiv(N, tile.columns)
    grid = plan_grid(tiles, processors=num_processors(x.device), tile=tile, pulling=pulling, share=peers.share)
    _gemm_scatter[(grid.programs,)](
        x,
        weight,
        bias,
        buffer,
        staging,
        y,
        pointers,
        peers.flags,
        peers.flag_pointers,
        peers.epoch,
        peers.counters,
        peers.errors,
        num_rows,
        rows,
        N,
        K,
        peers.rank,
        peers.limit,
        grid.multiplying,
        ALIGNED=rows * N * x.dtype.itemsize % 16 == 0,
        MOVE=tile.move,
        **product_options(x, bias, peers=peers, tile=tile, transposed=transposed),
    )
    return y


def compile_case(
    kernel, kind: str, dtype: str, *, arguments: dict, tiles: dict[str, Tile], expect: dict[str, tuple[str, ...]]
) -> CompileCase:
    """A case of this kernel or of gemm_all_reduce's; `arguments` are the signature of the other pointers."""
    signature = dict.fromkeys(("x", "weight", "bias", "partial", "staging"), f"*{dtype}") | arguments
    signature |= {"pointers": "*i64", "flag_pointers": "*i64"}
    signature |= dict.fromkeys(("flags", "epoch", "counters", "errors"), "*i32")
    signature |= dict.fromkeys(("num_rows", "segment_rows", "N", "K", "rank", "limit", "multiplying"), "i32")
    chosen = {"SIZE": 8, "NUM_FLAGS": 64, "BIAS": True, "TRANSPOSED": kind == "dgrad", "COMPUTE": tl.float32}
    return CompileCase(
        kernel,
        name=f"{kernel.__name__.lstrip('_')}/{kind}-{dtype}",
        signature=signature,
        attrs=tuple(word for word in signature if word not in ("rank", "limit", "multiplying")),
        expect={arch: (*expect.get(arch, ()), *WAITS, *SIGNALS) for arch in tiles},
        **launches(tiles, chosen | {"ALIGNED": True}, move=True),
    )


COMPILE = [
    compile_case(_gemm_scatter, "forward", "bf16", arguments={"y": "*bf16"}, tiles=REDUCE, expect=TENSOR_CORES),
    compile_case(_gemm_scatter, "dgrad", "bf16", arguments={"y": "*bf16"}, tiles=REDUCE, expect=TENSOR_CORES),
    compile_case(
        _gemm_scatter, "forward", "fp32", arguments={"y": "*fp32"}, tiles=dict.fromkeys(REDUCE, WIDE), expect={}
    ),
]
