"""Pieces of the Triton GEMMs of several ranks: one tile of a product, products owner by owner, and the pull of sums.

Numerics: products and sums in fp32 (fp64 for fp64); a partial product is rounded once when it is stored, as a plain
GEMM's result is, and the sum over ranks, in rank order, once more. So results are the same bits in every run.
Offsets are in int64.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels.gemm_plan import Tile
from megalite.kernels.signals.peers import Peers
from megalite.kernels.signals.triton_impl import READY, set_flag, wait_flag


@triton.jit
def tile_place(within, tiles_m, tiles_n, GROUP: tl.constexpr):
    """(row, column) of a tile of a segment; GROUP rows of tiles go together, so that neighbours share the L2."""
    first = (within // (GROUP * tiles_n)) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    rest = within % (GROUP * tiles_n)
    return first + rest % height, rest // height


@triton.jit
def multiply_tile(
    x,
    weight,
    rows,
    columns,
    num_rows,
    N,
    K,
    TRANSPOSED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """x[rows] (num_rows, K) @ weight (N, K)^T [:, columns]; TRANSPOSED: @ weight (K, N). Outside it is zero."""
    inner = tl.arange(0, BLOCK_K)
    x_place = x + rows.to(tl.int64)[:, None] * K + inner[None, :]
    if TRANSPOSED:
        weight_place = weight + inner.to(tl.int64)[:, None] * N + columns[None, :]
    else:
        weight_place = weight + columns.to(tl.int64)[None, :] * K + inner[:, None]
    in_rows, in_columns = (rows < num_rows)[:, None], (columns < N)[None, :]
    total = tl.zeros((rows.shape[0], columns.shape[0]), COMPUTE)
    for low in range(0, K, BLOCK_K):
        inside = inner < K - low
        left = tl.load(x_place, mask=in_rows & inside[None, :], other=0.0)
        right = tl.load(weight_place, mask=in_columns & inside[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee", out_dtype=COMPUTE)
        x_place += BLOCK_K
        if TRANSPOSED:
            weight_place += BLOCK_K * N.to(tl.int64)
        else:
            weight_place += BLOCK_K
    return total


@triton.jit
def multiply_segments(
    x,
    weight,
    partial,
    counters,
    flag_pointers,
    now,
    worker,
    workers,
    num_rows,
    segment_rows,
    N,
    K,
    rank,
    SIZE: tl.constexpr,
    NUM_FLAGS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """partial (num_rows, N) = x @ weight^T, owner rank + 1 first and the own segment last; never waits.

    Owner o has rows [o * segment_rows, (o + 1) * segment_rows), cut off at num_rows. Whoever stores an owner's last
    tile sets READY there; owners without rows get theirs too.
    """
    tiles_m, tiles_n = tl.cdiv(segment_rows, BLOCK_M), tl.cdiv(N, BLOCK_N)
    per_owner = tiles_m * tiles_n
    for tile in range(worker, SIZE * per_owner, workers):
        owner = (rank + 1 + tile // per_owner) % SIZE
        m, n = tile_place(tile % per_owner, tiles_m, tiles_n, GROUP)
        start = owner.to(tl.int64) * segment_rows
        rows, columns = m * BLOCK_M + tl.arange(0, BLOCK_M), n * BLOCK_N + tl.arange(0, BLOCK_N)
        height = tl.minimum(segment_rows, num_rows - owner * segment_rows)
        total = multiply_tile(x + start * K, weight, rows, columns, height, N, K, TRANSPOSED, BLOCK_K, COMPUTE)
        place = partial + (start + rows.to(tl.int64)[:, None]) * N + columns[None, :]
        mask = (rows < height)[:, None] & (columns < N)[None, :]
        tl.store(place, total.to(partial.dtype.element_ty), mask=mask)
        tl.debug_barrier()  # all threads' stores come before the one thread's release
        if tl.atomic_add(counters + owner, 1, sem="acq_rel", scope="gpu") == per_owner - 1:
            set_flag(flag_pointers, owner, rank, READY, now, NUM_FLAGS)


@triton.jit
def pull_segments(
    pointers,
    staging,
    flags,
    errors,
    now,
    worker,
    workers,
    start,
    length,
    stride,
    rank,
    limit,
    SIZE: tl.constexpr,
    NUM_FLAGS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Copy `length` elements from `start` on of every peer's buffer into staging (SIZE - 1, stride), as they come.

    Rank - 1 has this rank's segment first, then rank - 2 and so on: row i of staging is of rank - 1 - i.
    Each worker takes every workers-th block, here and when it sums, so that it reads what itself has written.
    Returns 0, or NaN if anything came late.
    """
    failed = tl.load(errors)
    for step in range(1, SIZE):
        source = (rank - step + SIZE) % SIZE
        failed += wait_flag(flags, source, READY, now, errors, rank, limit, NUM_FLAGS)
        place = tl.load(pointers + source).to(tl.pointer_type(staging.dtype.element_ty)) + start
        if ALIGNED:
            place = tl.multiple_of(place, 16)
        row = staging + (step - 1) * stride
        at = worker * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
        for _ in range(worker, tl.cdiv(length, BLOCK), workers):
            tl.store(row + at, tl.load(place + at, mask=at < length), mask=at < length)
            at += workers * BLOCK
    failed += wait_flag(flags, rank, READY, now, errors, rank, limit, NUM_FLAGS)
    return tl.where(failed == 0, 0.0, float("nan"))


@triton.jit
def sum_block(
    own, staging, bias, at, length, stride, N, rank, SIZE: tl.constexpr, BIAS: tl.constexpr, COMPUTE: tl.constexpr
):
    """The sum over ranks, in rank order, of the elements `at` of a segment; the bias is added to the sum."""
    inside = at < length
    total = tl.zeros(at.shape, COMPUTE)
    for source in range(SIZE):
        place = own
        if source != rank:
            place = staging + ((rank - 1 - source + SIZE) % SIZE) * stride
        total += tl.load(place + at, mask=inside, other=0.0).to(COMPUTE)
    if BIAS:
        total += tl.load(bias + at % N, mask=inside, other=0.0).to(COMPUTE)
    return total


def product_options(x: Tensor, bias: Tensor | None, *, peers: Peers, tile: Tile, transposed: bool) -> dict[str, Any]:
    """The constexprs and launch options that all these kernels take."""
    return tile.constexprs | {
        "SIZE": peers.size,
        "NUM_FLAGS": peers.flags.shape[1],
        "BIAS": bias is not None,
        "TRANSPOSED": transposed,
        "COMPUTE": tl.float64 if x.dtype == torch.float64 else tl.float32,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
