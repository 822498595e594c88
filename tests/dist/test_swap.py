"""Large collectives between two gloo ranks: values, aliasing, many in flight, and that receives are announced first."""

import pytest
import torch
import torch.distributed as dist

from megalite.comm import swap
from megalite.comm.collectives import all_gather, reduce_scatter
from megalite.mesh import Sizes
from tests.dist.pool import mesh_for, run_ranks

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def values(rank: int, num_rows: int, dtype: torch.dtype, start: int = 0) -> torch.Tensor:
    """Small integers, exact in every dtype; `num_rows` rows of 512."""
    return ((torch.arange(num_rows * 512) + start + 5 * rank) % 17 - 8).to(dtype).view(num_rows, 512)


def gathers_and_reduces(rank: int, world: int, dtype: torch.dtype, in_place: bool) -> None:
    group = mesh_for(Sizes(tp=world), cpu_backend="gloo").tp
    num_rows = swap.LARGE_BYTES // (512 * dtype.itemsize)
    works, checks = [], []
    for number in range(4):  # all on their way at once
        mine = [values(r, num_rows, dtype, number) for r in range(world)]
        assert swap.can_swap(group, mine[rank])
        assert not swap.can_swap(group, mine[rank][1:])
        out = torch.full((world * num_rows, 512), torch.nan, dtype=dtype)
        shard = out[rank * num_rows : (rank + 1) * num_rows].copy_(mine[rank]) if in_place else mine[rank]
        works.append(all_gather(out, shard, group, async_op=True))
        checks.append((out, torch.cat(mine)))

        fulls = [values(r, world * num_rows, dtype, number) for r in range(world)]
        full = fulls[rank].clone()
        out = full[rank * num_rows : (rank + 1) * num_rows] if in_place else torch.empty_like(full[:num_rows])
        works.append(reduce_scatter(out, full, group, async_op=True))
        checks.append((out, sum(fulls).chunk(world)[rank]))
    for work in works:
        work.wait()
        work.wait()  # once more does no harm, and adds nothing
    for found, expected in checks:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(dtype: torch.dtype, in_place: bool):
    run_ranks(2, gathers_and_reduces, dtype, in_place)


def order_of_messages(rank: int, world: int) -> list[str]:
    group = mesh_for(Sizes(tp=world), cpu_backend="gloo").tp
    order: list[str] = []
    plain = {name: getattr(dist, name) for name in ("irecv", "isend")}

    def noted(name: str):
        def call(*args, **kwargs):
            order.append(name)
            return plain[name](*args, **kwargs)

        return call

    try:
        for name in plain:
            setattr(dist, name, noted(name))
        large = values(rank, 256, torch.float32)
        all_gather(torch.empty(512, 512), large, group)
        reduce_scatter(torch.empty(256, 512), torch.cat([large, large]), group)
        all_gather(torch.empty(2, 512), large[:1], group)  # small: gloo's own
    finally:
        for name, function in plain.items():
            setattr(dist, name, function)
    return order


def test_receives_come_first():
    assert run_ranks(2, order_of_messages) == [["irecv", "isend"] * 2] * 2


def larger_groups(rank: int, world: int) -> bool:
    group = mesh_for(Sizes(tp=world), cpu_backend="gloo").tp
    return swap.can_swap(group, values(rank, 256, torch.float64))


def test_larger_groups_use_gloos_rings():
    assert run_ranks(4, larger_groups) == [False] * 4
