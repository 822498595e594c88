"""One rank of the collectives' bench: the same megalite group once with its local channel and once without.

Invariant: contestants take turns within a case, so that a busy machine hits all of them alike; before anything is timed
their results are compared.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from bench.comm_cases import Case, Plan
from megalite.comm import collectives
from megalite.comm.attach import attach_channels
from megalite.config.schema import Comm
from megalite.mesh import Group, Sizes, build_mesh

TIMEOUT_S = 120.0


def serve(connection, plan: Plan) -> None:
    """Say why the fast path is missing (or nothing), then answer each case with seconds by contestant until None."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    group, missing = whole_group()
    connection.send(missing)
    while (case := connection.recv()) is not None:
        connection.send(seconds(case, plan, group))
    dist.barrier()
    dist.destroy_process_group()


def whole_group() -> tuple[Group, str]:
    """All ranks, with the channel through shared memory; without one and the reason where that is not possible."""
    mesh = build_mesh(Sizes(tp=dist.get_world_size()), device=torch.device("cpu"), timeout_s=TIMEOUT_S)
    try:
        return attach_channels(mesh, Comm(cpu_backend="shm"), timeout_s=TIMEOUT_S).tp, ""
    except ValueError as error:
        return mesh.tp, str(error)


@dataclass(frozen=True)
class Call:
    """One contestant's call, again and again; `result` is where its outcome is, `reset` refills what it overwrites."""

    run: Callable[[], None]
    result: Tensor
    reset: Callable[[], None]


def seconds(case: Case, plan: Plan, group: Group) -> dict[str, list[float]]:
    """Seconds per call of each round on this rank."""
    names = [name for name in case.contestants if name != "shm" or group.local is not None]
    calls = {name: call_of(case, name, group) for name in names}
    compare(case, calls)
    number = number_of_calls(calls, plan)
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(plan.rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(number[name]):
                calls[name].run()
            found[name].append((time.perf_counter() - start) / number[name])
    return found


def call_of(case: Case, name: str, group: Group) -> Call:
    """A contestant's call on buffers of its own."""
    group = group if name == "shm" else replace(group, local=None)
    if case.op == "barrier":
        run = group.local.barrier if group.local is not None else lambda: dist.barrier(group=group.pg)
        return Call(run, torch.zeros(1), lambda: None)
    dtype = getattr(torch, case.dtype)
    numel = case.num_bytes // dtype.itemsize
    assert numel % case.size == 0, case
    values = (torch.arange(numel) % 13 + group.rank).to(dtype)
    full, shard = torch.zeros(numel, dtype=dtype), torch.zeros(numel // case.size, dtype=dtype)

    def reset() -> None:
        full.copy_(values)
        shard.copy_(values[: shard.numel()])

    runs = {
        "all_reduce": (lambda: collectives.all_reduce(full, group), full),
        "reduce_scatter": (lambda: collectives.reduce_scatter(shard, full, group), shard),
        "all_gather": (lambda: collectives.all_gather(full, shard, group), full),
        "broadcast": (lambda: collectives.broadcast(full, group), full),
    }
    run, result = runs[case.op]
    if name == "own":
        own = collectives._reduce_scatter_single
        run = lambda: own(shard, full, group=group.pg)  # noqa: E731
    return Call(run, result, reset)


def compare(case: Case, calls: dict[str, Call]) -> None:
    """Run each once from the same values; then leave zeros, which repeated sums keep.

    Raises:
        RuntimeError: the contestants disagree.
    """
    for call in calls.values():
        call.reset()
        call.run()
    first, *others = calls.items()
    for name, call in others:
        if not torch.equal(first[1].result, call.result):  # sums of a few small integers: exact in every dtype
            raise RuntimeError(f"{case}: {first[0]} and {name} disagree")
    for call in calls.values():
        call.reset()
        call.result.zero_()


def number_of_calls(calls: dict[str, Call], plan: Plan) -> dict[str, int]:
    """Calls that make up about plan.turn_s, agreed on by all ranks."""
    times = []
    for call in calls.values():
        start = time.perf_counter()
        call.run()
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(times)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return {
        name: max(1, min(plan.max_calls, int(plan.turn_s / t))) for name, t in zip(calls, slowest.tolist(), strict=True)
    }
