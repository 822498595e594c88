"""Threads of real ranks: gloo's are batch threads where every rank has a core, all are on crowded hosts."""

import os
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import pytest

from megalite.comm import attach, threads
from megalite.config.schema import Comm
from megalite.mesh import Sizes
from tests.dist.pool import mesh_for, run_ranks

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="needs Linux")


def policies() -> dict[int, tuple[str, int]]:
    """Thread -> its name and policy."""
    return {
        int(task.name): ((task / "comm").read_text(), os.sched_getscheduler(int(task.name)))
        for task in threads.TASKS.iterdir()
    }


def changed_by(call: Callable[[], object]) -> tuple[object, dict[int, tuple[str, int]]]:
    """What the call returns and makes of this process' threads, all plain before; they end as they were."""
    before = policies()
    try:
        for thread in before:
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
        return call(), policies()
    finally:
        for thread, (_, policy) in before.items():
            os.sched_setscheduler(thread, policy, os.sched_param(0))


def after_the_call(rank: int, world: int, crowded: bool) -> tuple[int, int, dict]:
    """The number returned, this process' id, which is its first thread's, and the policies."""
    mesh_for(Sizes(dp_shard=world))
    return os.getpid(), *changed_by(partial(threads.let_compute_go_on, crowded=crowded))


def after_attaching(rank: int, world: int, num_cores: int) -> int:
    """The computing thread's policy once a mesh has its channels on a host of that many cores."""
    mesh = mesh_for(Sizes(dp_shard=world))
    with patch.object(attach, "_num_cores", lambda: num_cores):
        _, found = changed_by(lambda: attach.attach_channels(mesh, Comm(cpu_backend="gloo"), timeout_s=30))
    return found[os.getpid()][1]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("crowded", [False, True])
def test_gloos_threads_become_batch_threads_and_the_computing_one_on_crowded_hosts(crowded):
    for pid, num, found in run_ranks(2, after_the_call, crowded):
        batch = {thread for thread, (_, policy) in found.items() if policy == os.SCHED_BATCH}
        assert batch == {thread for thread, (name, _) in found.items() if crowded or "gloo" in name}
        assert num == len(batch) > 0
        assert (pid in batch) == crowded


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("num_cores", "policy"), [(2, "SCHED_OTHER"), (1, "SCHED_BATCH")])
def test_a_host_is_crowded_with_more_ranks_than_cores(num_cores, policy):
    assert run_ranks(2, after_attaching, num_cores) == [getattr(os, policy)] * 2


def num_loops(rank: int, world: int) -> tuple[int, int]:
    """gloo's threads that move messages, and the groups that this rank is in besides the default one."""
    mesh = mesh_for(Sizes(pp=2, dp_shard=2))
    groups = {getattr(mesh, name).pg for name in ("world", "pp", "pp_backward", "dp", "dp_shard")}
    return sum("gloo_tcp_loop" in name for name, _ in policies().values()), len(groups - {None})


@pytest.mark.timeout(60)
def test_all_groups_of_a_rank_share_one_thread_that_moves_messages():
    assert run_ranks(4, num_loops) == [(1, 5)] * 4
