"""gloo's threads of real ranks: batch threads where every rank has a core, as they were on crowded hosts."""

import os
from collections.abc import Callable
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


def after_the_call(rank: int, world: int) -> tuple[int, int, dict]:
    """The number returned, this process' id, which is its first thread's, and the policies."""
    mesh_for(Sizes(dp_shard=world))
    return os.getpid(), *changed_by(threads.let_compute_go_first)


def after_attaching(rank: int, world: int, num_cores: int) -> set[int]:
    """Policies of gloo's threads once a mesh has its channels on a host of that many cores."""
    mesh = mesh_for(Sizes(dp_shard=world))
    with patch.object(attach, "_num_cores", lambda: num_cores):
        _, found = changed_by(lambda: attach.attach_channels(mesh, Comm(cpu_backend="gloo"), timeout_s=30))
    return {policy for name, policy in found.values() if "gloo" in name}


@pytest.mark.timeout(60)
def test_gloos_threads_become_batch_threads_and_the_computing_one_does_not():
    for pid, num, found in run_ranks(2, after_the_call):
        batch = {thread for thread, (_, policy) in found.items() if policy == os.SCHED_BATCH}
        assert batch == {thread for thread, (name, _) in found.items() if "gloo" in name}
        assert num == len(batch) > 0
        assert found[pid][1] == os.SCHED_OTHER


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("num_cores", "policy"), [(2, "SCHED_BATCH"), (1, "SCHED_OTHER")])
def test_only_where_every_rank_has_a_core(num_cores, policy):
    assert run_ranks(2, after_attaching, num_cores) == [{getattr(os, policy)}] * 2
