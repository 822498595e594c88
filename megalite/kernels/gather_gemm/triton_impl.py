"""AG+GEMM in Triton: a persistent GEMM over the ranks' rows that starts with its own and waits once per other shard.

Tiles go shard by shard: own (read from the local x), rank + 1, rank + 2 ... Peers push in reverse ring order, so shard
rank + 1 comes first. Tiles are loaded with cp.async through the L2, never with ld.nc: the data was written by peers.
Reference: design after Flux (arXiv:2406.06858) and the persistent gated GEMMs that followed it.
"""

import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels.compile_cases import CompileCase
from megalite.kernels.gemm_kernels import multiply_tile, product_options, tile_place
from megalite.kernels.gemm_plan import GATHER, TENSOR_CORES, WIDE, Tile, launches, num_processors, plan_grid, tile_for
from megalite.kernels.signals.peers import Peers
from megalite.kernels.signals.triton_impl import READY, WAITS, wait_flag


@triton.jit(do_not_specialize=["rank", "limit"])
def _gather_gemm(
    x,
    gathered,
    weight,
    bias,
    y,
    flags,
    epoch,
    errors,
    shard_rows,
    N,
    K,
    rank,
    limit,
    SIZE: tl.constexpr,
    NUM_FLAGS: tl.constexpr,
    BIAS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    now = tl.load(epoch)
    tiles_m, tiles_n = tl.cdiv(shard_rows, BLOCK_M), tl.cdiv(N, BLOCK_N)
    per_shard = tiles_m * tiles_n
    ready = rank
    failed = tl.load(errors)
    for tile in range(tl.program_id(0), SIZE * per_shard, tl.num_programs(0)):
        shard = (rank + tile // per_shard) % SIZE
        if shard != ready:
            failed += wait_flag(flags, shard, READY, now, errors, rank, limit, NUM_FLAGS)
            ready = shard
        start = shard.to(tl.int64) * shard_rows
        source = gathered + start * K
        if shard == rank:
            source = x
        m, n = tile_place(tile % per_shard, tiles_m, tiles_n, GROUP)
        rows, columns = m * BLOCK_M + tl.arange(0, BLOCK_M), n * BLOCK_N + tl.arange(0, BLOCK_N)
        total = multiply_tile(source, weight, rows, columns, shard_rows, N, K, TRANSPOSED, BLOCK_K, COMPUTE)
        if BIAS:
            total += tl.load(bias + columns, mask=columns < N, other=0.0).to(COMPUTE)[None, :]
        total += tl.where(failed == 0, 0.0, float("nan"))
        place = y + (start + rows.to(tl.int64)[:, None]) * N + columns[None, :]
        mask = (rows < shard_rows)[:, None] & (columns < N)[None, :]
        tl.store(place, total.to(y.dtype.element_ty), mask=mask)


def forward(
    x: Tensor, gathered: Tensor, weight: Tensor, bias: Tensor | None, *, peers: Peers, transposed: bool = False
) -> Tensor:
    """(M, N): all ranks' rows times the weight; see reference.forward.

    Args:
        x:        (M/W, K), this rank's rows, contiguous.
        gathered: (M, K), contiguous; peers write their rows here and then set READY to the epoch. Own rows aren't read.
        weight:   (N, K), or (K, N) if transposed; contiguous.

    Numerics: sums of products in fp32 (fp64 for fp64), one rounding.
    """
    (rows, K), N = x.shape, weight.shape[1 if transposed else 0]
    y = x.new_empty(rows * peers.size, N)
    tile = tile_for(GATHER, x.dtype, x.device)
    tiles = peers.size * triton.cdiv(rows, tile.rows) * triton.cdiv(N, tile.columns)
    grid = plan_grid(tiles, processors=num_processors(x.device), tile=tile, share=peers.share)
    _gather_gemm[(grid.programs,)](
        x,
        gathered,
        weight,
        bias,
        y,
        peers.flags,
        peers.epoch,
        peers.errors,
        rows,
        N,
        K,
        peers.rank,
        peers.limit,
        **product_options(x, bias, peers=peers, tile=tile, transposed=transposed),
    )
    return y


def _compile_case(kind: str, dtype: str, tiles: dict[str, Tile], expect: dict[str, tuple[str, ...]]) -> CompileCase:
    signature = dict.fromkeys(("x", "gathered", "weight", "bias", "y"), f"*{dtype}")
    signature |= dict.fromkeys(("flags", "epoch", "errors"), "*i32")
    signature |= dict.fromkeys(("shard_rows", "N", "K", "rank", "limit"), "i32")
    chosen = {"SIZE": 8, "NUM_FLAGS": 64, "BIAS": True, "TRANSPOSED": kind == "dgrad", "COMPUTE": tl.float32}
    return CompileCase(
        _gather_gemm,
        name=f"gather_gemm/{kind}-{dtype}",
        signature=signature,
        attrs=tuple(word for word in signature if word not in ("rank", "limit")),
        expect={arch: (*expect.get(arch, ()), *WAITS) for arch in tiles},
        **launches(tiles, chosen),
    )


COMPILE = [
    _compile_case("forward", "bf16", GATHER, TENSOR_CORES),
    _compile_case("dgrad", "bf16", GATHER, TENSOR_CORES),
    _compile_case("forward", "fp32", dict.fromkeys(GATHER, WIDE), {}),
]
