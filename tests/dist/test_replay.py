"""tools/bench/replay.py on two ranks: what a step calls is noted in order and can be called again alone."""

import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megalite.comm.collectives import all_gather, all_reduce, reduce_scatter
from megalite.comm.swap import LARGE_BYTES
from megalite.mesh import Sizes
from tests.dist.pool import mesh_for, run_ranks

TOOLS = str(Path(__file__).resolve().parents[2] / "tools")
sys.path.insert(0, TOOLS)
from bench.replay import Recorder, Replay, exchanges  # noqa: E402

while TOOLS in sys.path:
    sys.path.remove(TOOLS)


def noted_and_replayed(rank: int, world: int) -> tuple[list[str], list[int], list[str]]:
    group = mesh_for(Sizes(tp=world), cpu_backend="gloo").tp
    small, large = torch.ones(4), torch.ones(LARGE_BYTES // 4)

    def step() -> None:
        works = [all_gather(torch.empty(2 * large.numel()), large, group, async_op=True)]
        works.append(reduce_scatter(torch.empty(2), small, group, async_op=True))
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        all_reduce(small, group)
        for work in works:
            work.wait()

    with Recorder() as recorder:
        step()
    replay = Replay(recorder.calls)
    with Recorder() as again:
        replay.run()
    with Recorder() as functional:
        dist._functional_collectives.all_gather_tensor(small, 0, group.pg).sum()
    Replay(functional.calls).run()
    sizes = [len(calls) for calls in exchanges(recorder.calls)]
    return [call.name for call in recorder.calls], sizes, [call.name for call in again.calls + functional.calls]


@pytest.mark.parametrize(
    ("names", "sizes"),
    [
        (["a", "b"], [1, 1]),
        (["recv_", "send", "recv_", "send", "a"], [2, 2, 1]),
        (["recv_", "recv_", "send", "a", "send", "b"], [5, 1]),
    ],
)
def test_receives_wait_for_their_sends(names, sizes):
    calls = [SimpleNamespace(name=name) for name in names]
    found = exchanges(calls)
    assert [len(group) for group in found] == sizes
    assert list(chain.from_iterable(found)) == calls


def test_a_step_is_noted_and_replayed():
    names = ["recv_", "send", "alltoall_base_", "allreduce_"]
    for found in run_ranks(2, noted_and_replayed):
        assert found == (names, [2, 1, 1], [*names, "all_gather_into_tensor"])
