"""Collectives and messages on real ranks: values, dtypes, asynchrony, empty tensors, and the bytes in the ledger."""

import pytest
import torch
from torch import Tensor

from megalite import native
from megalite.comm.collectives import all_gather, all_reduce, broadcast, reduce_scatter
from megalite.comm.p2p import irecv, isend
from megalite.mesh import Sizes, single_device_mesh
from megalite.observe.ledger import Entry
from tests.dist.pool import mesh_for, run_ranks

SHM = pytest.param("shm", marks=pytest.mark.skipif(native.load() is None, reason="needs the compiled extension"))
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def numbers(rank: int, *shape: int, dtype: torch.dtype) -> Tensor:
    """Small integers, exact in every dtype also after a sum over 4 ranks, different in each element and rank."""
    return ((torch.arange(torch.Size(shape).numel()) * 3 + rank * 5) % 17 - 8).to(dtype).view(shape)


def only_entry(ledger) -> tuple[str, str, str, int]:
    (entry,) = ledger.sent_bytes
    assert ledger.calls[entry] == 1
    return entry.axis, entry.op, entry.site, ledger.sent_bytes[entry]


def every_collective(rank: int, world: int, dtype: torch.dtype, async_op: bool, cpu_backend: str) -> None:
    mesh = mesh_for(Sizes(tp=world), cpu_backend=cpu_backend)
    assert (mesh.tp.local is not None) == (cpu_backend == "shm")
    group, ledger = mesh.tp, mesh.ledger
    everyone = [numbers(r, world * 3, 5, dtype=dtype) for r in range(world)]
    full_bytes = everyone[0].nbytes
    how = {"site": "here", "async_op": async_op}

    for op, expected in (
        ("sum", sum(everyone[1:], everyone[0])),
        ("max", torch.stack(everyone).amax(0)),
        ("min", torch.stack(everyone).amin(0)),
    ):
        x = everyone[rank].clone()
        all_reduce(x, group, op=op, **how).wait()
        assert torch.equal(x, expected)
        assert only_entry(ledger) == ("tp", "all_reduce", "here", 2 * (world - 1) * full_bytes // world)
        ledger.reset()

    out = torch.full((world * world * 3, 5), torch.nan, dtype=dtype)
    all_gather(out, everyone[rank], group, **how).wait()
    assert torch.equal(out, torch.cat(everyone))
    assert only_entry(ledger) == ("tp", "all_gather", "here", (world - 1) * full_bytes)
    ledger.reset()

    out = torch.full((world * world * 3, 5), torch.nan, dtype=dtype)
    own = out.chunk(world)[rank]
    own.copy_(everyone[rank])
    all_gather(out, own, group, **how).wait()  # the shard lies in its place
    assert torch.equal(out, torch.cat(everyone))
    ledger.reset()

    out = torch.full((3, 5), torch.nan, dtype=dtype)
    full = everyone[rank].clone()
    reduce_scatter(out, full, group, **how).wait()
    assert torch.equal(out, sum(everyone[1:], everyone[0]).chunk(world)[rank])
    assert torch.equal(full, everyone[rank])
    assert only_entry(ledger) == ("tp", "reduce_scatter", "here", (world - 1) * full_bytes // world)
    ledger.reset()

    x = everyone[rank].clone()
    broadcast(x, group, root=world - 1, **how).wait()
    assert torch.equal(x, everyone[world - 1])
    sent = (world - 1) * full_bytes if rank == world - 1 else 0
    assert only_entry(ledger) == ("tp", "broadcast", "here", sent)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("cpu_backend", ["gloo", SHM])
def test_values_and_bytes(world: int, dtype: torch.dtype, async_op: bool, cpu_backend: str):
    run_ranks(world, every_collective, dtype, async_op, cpu_backend)


def empty_tensors(rank: int, world: int) -> None:
    group = mesh_for(Sizes(tp=world)).tp
    for dtype in DTYPES:
        x = torch.empty(0, 5, dtype=dtype)
        all_reduce(x, group).wait()
        all_gather(torch.empty(0, 5, dtype=dtype), x, group).wait()
        reduce_scatter(torch.empty(0, 5, dtype=dtype), x, group).wait()
        broadcast(x, group).wait()
    assert sum(group.ledger.sent_bytes.values()) == 0


def test_empty_tensors_send_nothing():
    run_ranks(4, empty_tensors)


def overlapping_collectives(rank: int, world: int) -> None:
    group = mesh_for(Sizes(tp=world)).tp
    works, tensors = [], []
    for i in range(20):
        x = torch.full((1000,), float(rank + i))
        out = torch.empty(1000 // world)
        works += [reduce_scatter(out, x, group, async_op=True), all_reduce(y := x.clone(), group, async_op=True)]
        tensors += [(out, y)]
    for work in reversed(works):
        work.wait()
        work.wait()  # may be called again
    for i, (out, y) in enumerate(tensors):
        expected = float(world * i + sum(range(world)))
        assert out.unique().tolist() == y.unique().tolist() == [expected]


def test_many_in_flight_waited_in_reverse():
    run_ranks(4, overlapping_collectives)


def sum_in_rank_order(rank: int, world: int) -> None:
    group = mesh_for(Sizes(tp=world)).tp
    for attempt in range(5):
        everyone = [torch.randn(world * 64, generator=torch.Generator().manual_seed(r)) for r in range(world)]
        everyone = [x * 10.0 ** (3 * r) for r, x in enumerate(everyone)]
        out = torch.empty(64)
        reduce_scatter(out, everyone[rank], group)
        expected = sum(everyone[1:], everyone[0]).chunk(world)[rank]
        assert torch.equal(out, expected), attempt


def test_reduce_scatter_is_bitwise_the_sum_in_rank_order():
    run_ranks(4, sum_in_rank_order)


def both_ways(rank: int, world: int) -> None:
    """Both neighbours are the same rank: the two directions have their own channels and can't swap."""
    mesh = mesh_for(Sizes(pp=world))
    after, before = (rank + 1) % world, (rank - 1) % world
    sent, received = [], []
    for i in range(8):
        forward, backward = torch.empty(3, 2), torch.empty(3, 2)
        received += [(irecv(forward, mesh.pp, source=before, tag=0), 100 * before + i)]
        received += [(irecv(backward, mesh.pp_backward, source=after, tag=0), -100 * after - i)]
    for i in range(8):
        sent += [isend(torch.full((3, 2), -100.0 * rank - i), mesh.pp_backward, to=before, tag=0, site="grad")]
        sent += [isend(torch.full((3, 2), 100.0 * rank + i), mesh.pp, to=after, tag=0, site="activation")]
    for message, expected in reversed(received):
        assert message.wait().unique().tolist() == [float(expected)]
        assert message.wait() is message.tensor
    for message in sent:
        message.wait()
    assert dict(mesh.ledger.sent_bytes) == {Entry("pp", "send", site): 8 * 24 for site in ("grad", "activation")}
    assert mesh.ledger.by_axis() == {"pp": 2 * 8 * 24}


@pytest.mark.parametrize("world", [2, 4])
def test_messages_in_both_directions(world: int):
    run_ranks(world, both_ways)


def sums_along_each_axis(rank: int, world: int, sizes: Sizes) -> None:
    """Every axis group holds exactly the ranks with the same other coordinates, in coordinate order."""
    mesh = mesh_for(sizes, kv_replicas=2)
    own = sizes.coordinates(rank)
    for axis in ("pp", "dp_replicate", "dp_shard", "tp"):
        group = getattr(mesh, axis)
        assert (group.axis, group.size, group.rank) == (axis, getattr(sizes, axis), own[axis])
        out = torch.empty(group.size, dtype=torch.float64)
        all_gather(out, torch.tensor([float(rank)], dtype=torch.float64), group)
        assert out.tolist() == [sizes.rank(**(own | {axis: i})) for i in range(group.size)] == list(group.ranks)
    assert mesh.kv.ranks == mesh.tp.ranks[own["tp"] // 2 * 2 :][:2]
    assert mesh.dp.rank == own["dp_replicate"] * sizes.dp_shard + own["dp_shard"]
    assert mesh.world.ranks == tuple(range(world))
    x = torch.ones(1)
    all_reduce(x, mesh.tied)
    ends = own["pp"] in (0, sizes.pp - 1)
    assert x.item() == mesh.tied.size == (2 if ends and sizes.pp > 1 else 1)


@pytest.mark.parametrize(
    "sizes", [Sizes(pp=2, dp_shard=2, tp=2), Sizes(dp_replicate=2, dp_shard=2, tp=2), Sizes(pp=4, tp=2)], ids=str
)
def test_groups_of_a_mesh(sizes: Sizes):
    run_ranks(8, sums_along_each_axis, sizes)


def test_size_one_is_a_no_op_that_still_fills_the_output():
    mesh = single_device_mesh()
    x, out = torch.arange(6.0).view(2, 3), torch.empty(2, 3)
    all_reduce(x, mesh.tp).wait()
    all_gather(out, x, mesh.tp).wait()
    assert torch.equal(out, x)
    out = torch.empty(2, 3)
    reduce_scatter(out, x, mesh.dp, async_op=True).wait()
    assert torch.equal(out, x)
    broadcast(x, mesh.pp).wait()
    assert x.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert not mesh.ledger.sent_bytes
