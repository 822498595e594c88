"""The rank pool itself: results, reuse, and what is reported when a rank raises, dies or hangs."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from megalite.mesh import Sizes
from tests.dist.pool import KEPT_MESHES, MAX_MESHES, RankError, mesh_for, process_groups, run_ranks


def sum_of_ranks(rank: int, world: int, scale: int) -> tuple[int, torch.Tensor, int]:
    x = torch.full((3,), float(rank * scale), dtype=torch.bfloat16)
    dist.all_reduce(x)
    return rank, x, os.getpid()


def one_raises(rank: int, world: int) -> None:
    if rank == 1:
        raise KeyError("planted")
    dist.barrier()


def one_dies(rank: int, world: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSEGV)


def planted_hang(rank: int, world: int) -> None:
    if rank == 1:
        time.sleep(60)


def num_other_groups() -> int:
    kept = sum(len(process_groups(mesh)) for mesh in KEPT_MESHES.values())
    return len(dist.distributed_c10d._world.pg_map) - kept


def use_many_meshes(rank: int, world: int) -> None:
    others = num_other_groups()
    all_sizes = [Sizes(tp=4), Sizes(dp_shard=4), Sizes(pp=4), Sizes(dp_replicate=2, tp=2), Sizes(pp=2, tp=2)]
    for sizes in 2 * [*all_sizes, Sizes(pp=2, dp_shard=2), Sizes(dp_replicate=2, dp_shard=2)]:
        mesh = mesh_for(sizes, kv_replicas=sizes.tp)
        assert mesh.ledger.calls.total() == 0
        mesh.ledger.record("tp", "send", "", 1)
        x = torch.ones(1)
        dist.all_reduce(x, group=mesh.world.pg)
        assert x.item() == world
        assert mesh_for(sizes, kv_replicas=sizes.tp) is mesh
        assert len(KEPT_MESHES) <= MAX_MESHES
        assert num_other_groups() == others


def test_results_and_reuse():
    first = run_ranks(2, sum_of_ranks, 5)
    again = run_ranks(2, sum_of_ranks, 7)
    assert [r for r, _, _ in first] == [0, 1]
    assert first[0][1].dtype == torch.bfloat16
    assert first[1][1].tolist() == [5.0] * 3
    assert again[0][1].tolist() == [7.0] * 3
    assert [pid for _, _, pid in first] == [pid for _, _, pid in again]


def test_traceback_of_the_rank_that_raised_and_stack_of_the_one_that_waits():
    with pytest.raises(RankError) as failure:
        run_ranks(2, one_raises)
    assert "KeyError: 'planted'" in failure.value.ranks[1]
    assert "one_raises" in failure.value.ranks[1]
    assert "in one_raises" in failure.value.ranks[0]
    assert "barrier" in failure.value.ranks[0]


def test_a_dead_rank_is_named_with_its_signal_and_the_pool_comes_back():
    with pytest.raises(RankError, match="SIGSEGV"):
        run_ranks(2, one_dies)
    assert len(run_ranks(2, sum_of_ranks, 1)) == 2


def test_a_hung_rank_is_named_with_its_stack():
    with pytest.raises(RankError, match="planted_hang") as failure:
        run_ranks(2, planted_hang, timeout_s=1.0)
    assert list(failure.value.ranks) == [1]
    assert "in planted_hang" in failure.value.ranks[1]


def test_a_function_that_ranks_cannot_import_is_refused():
    with pytest.raises(ValueError, match="module level"):
        run_ranks(2, lambda rank, world: None)


def test_only_the_groups_of_the_last_meshes_are_kept():
    run_ranks(4, use_many_meshes)
