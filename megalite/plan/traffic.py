"""What a rank sends in one training step, by axis, op and call site: calls and bytes, from the config alone.

Invariant: equals the ledger of a real step exactly, on every rank (tests/dist/test_plan_ledger.py). Counts are the
ledger's: what a rank must send with the standard ring or direct algorithm. Ranks differ by their stages and by what
their shards hold. Pure.
"""

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch

from megalite.config.schema import Config
from megalite.observe.ledger import Entry, Ledger
from megalite.parallel.pp.actions import SENDS, Op
from megalite.parallel.zero.layout import FlatLayout, Run
from megalite.plan.live import Walk
from megalite.plan.units import RankPlan, plan_rank

NUM_SCALARS = 3
"""Loss, squared norm and stop flag: fp64, summed over all ranks once per step."""


class Sent(NamedTuple):
    """What one entry of the ledger holds."""

    calls: int
    sent_bytes: int


class Totals:
    """A ledger that is filled by rule: sizes of groups and tensors in, calls and bytes out."""

    def __init__(self) -> None:
        self.ledger = Ledger()

    def add(self, axis: str, op: str, site: str, *, sent_bytes: int, calls: int = 1) -> None:
        """`calls` times an op that sends `sent_bytes`."""
        if calls:
            self.ledger.calls[Entry(axis, op, site)] += calls
            self.ledger.sent_bytes[Entry(axis, op, site)] += calls * sent_bytes

    def all_reduce(self, axis: str, size: int, site: str, *, num_bytes: int, calls: int = 1) -> None:
        """Of a tensor of num_bytes."""
        if size > 1 and num_bytes:
            self.add(axis, "all_reduce", site, sent_bytes=2 * (size - 1) * num_bytes // size, calls=calls)

    def all_gather(self, axis: str, size: int, site: str, *, shard_bytes: int, calls: int = 1) -> None:
        """Of shards of shard_bytes."""
        if size > 1:
            self.add(axis, "all_gather", site, sent_bytes=(size - 1) * shard_bytes, calls=calls)

    def reduce_scatter(self, axis: str, size: int, site: str, *, shard_bytes: int, calls: int = 1) -> None:
        """Into shards of shard_bytes."""
        if size > 1:
            self.add(axis, "reduce_scatter", site, sent_bytes=(size - 1) * shard_bytes, calls=calls)


def traffic(config: Config, *, rank: int = 0) -> dict[Entry, Sent]:
    """Calls and bytes sent by `rank` in one training step that is not skipped."""
    plan, totals = plan_rank(config, rank=rank), Totals()
    _scalars(plan, totals)
    _pipeline(plan, totals)
    _tensor_parallel(plan, totals)
    _zero(plan, totals)
    return {entry: Sent(calls, totals.ledger.sent_bytes[entry]) for entry, calls in totals.ledger.calls.items()}


def _scalars(plan: RankPlan, totals: Totals) -> None:
    """The token count over dp, and loss, norm and stop over all ranks."""
    totals.all_reduce("dp", plan.sizes.dp, "step.tokens", num_bytes=torch.int64.itemsize)
    totals.all_reduce("world", plan.sizes.world, "step.scalars", num_bytes=NUM_SCALARS * torch.float64.itemsize)


def _pipeline(plan: RankPlan, totals: Totals) -> None:
    """One message of this rank's rows per listed SEND."""
    row = plan.training.actions[plan.at["pp"]]
    for op in SENDS:
        calls = sum(action.op is op for action in row)
        totals.add("pp", "send", op.value, sent_bytes=_own_rows(plan) * _row_bytes(plan), calls=calls)


def _row_bytes(plan: RankPlan) -> int:
    return plan.config.model.hidden_size * plan.compute.itemsize


def _own_rows(plan: RankPlan) -> int:
    """Rows between tp layers on one rank."""
    return plan.rows // plan.sizes.tp if plan.config.sequence_parallel else plan.rows


def _part_bytes(plan: RankPlan) -> int:
    """Of a part of the microbatch, whose collectives are its own; all of it where it has one part."""
    return _own_rows(plan) // plan.config.batch_parts * _row_bytes(plan)


# Tensor parallel


def _tensor_parallel(plan: RankPlan, totals: Totals) -> None:
    row = plan.training.actions[plan.at["pp"]]
    for stage, links in plan.links.items():
        num = sum(action.op is Op.F and action.stage == stage for action in row) * plan.config.batch_parts
        first, last = plan.config.stage_layers[stage]
        for layer in range(first, last):
            _block(plan, totals, num, again=plan.config.recompute_ops(layer))
        if stage == 0:
            _embedding(plan, totals, num)
        if stage == plan.config.num_stages - 1:
            _head(plan, totals, num)
        assert len(links) == last - first + (stage == 0) + (stage == plan.config.num_stages - 1)


def _block(plan: RankPlan, totals: Totals, num: int, *, again: Collection[str]) -> None:
    """`num` passes of parts through a block. What is recomputed runs its forward twice."""
    of_attention = 2 * num if "full" in again else num
    of_mlp = 2 * num if {"full", "mlp"} & set(again) else num
    wide = "mlp.gate_up" if plan.config.model.activation == "swiglu" else "mlp.up"
    for site, forwards in (("attention.qkv", of_attention), (wide, of_mlp)):
        _gather(plan, totals, f"{site}.forward", forwards)
        _reduce(plan, totals, f"{site}.backward", num)
    for site, forwards in (("attention.out", of_attention), ("mlp.down", of_mlp)):
        _reduce(plan, totals, f"{site}.forward", forwards)
        _gather(plan, totals, f"{site}.backward", num)


def _embedding(plan: RankPlan, totals: Totals, num: int) -> None:
    _reduce(plan, totals, "embedding.forward", num)
    _gather(plan, totals, "embedding.backward", num)


def _head(plan: RankPlan, totals: Totals, num: int) -> None:
    """Rows are gathered and dx is summed once; the loss takes the largest logit, then sum and target logit packed."""
    _gather(plan, totals, "head.forward", num)
    _reduce(plan, totals, "head.backward", num)
    column_bytes = plan.rows // plan.config.batch_parts * plan.main.itemsize
    totals.all_reduce("tp", plan.sizes.tp, "loss.max", num_bytes=column_bytes, calls=num)
    totals.all_reduce("tp", plan.sizes.tp, "loss.sum", num_bytes=2 * column_bytes, calls=num)


def _gather(plan: RankPlan, totals: Totals, site: str, calls: int) -> None:
    """All rows from each rank's."""
    if plan.config.sequence_parallel:
        totals.all_gather("tp", plan.sizes.tp, site, shard_bytes=_part_bytes(plan), calls=calls)


def _reduce(plan: RankPlan, totals: Totals, site: str, calls: int) -> None:
    """Partial sums of all rows into each rank's rows."""
    num_bytes = _part_bytes(plan)
    if plan.config.sequence_parallel:
        totals.reduce_scatter("tp", plan.sizes.tp, site, shard_bytes=num_bytes, calls=calls)
    else:
        totals.all_reduce("tp", plan.sizes.tp, site, num_bytes=num_bytes, calls=calls)


# ZeRO


def _zero(plan: RankPlan, totals: Totals) -> None:
    stage, shards = plan.config.zero.stage, plan.num_shards
    walk = Walk(plan, plan.config.zero.max_live_bytes).run(plan.training)
    replicas, axis = (plan.sizes.dp, "dp") if stage == 0 else (plan.sizes.dp_replicate, "dp_replicate")
    sent = torch.bfloat16 if plan.config.precision.reduce == "bf16" else plan.main
    for name, layout in plan.layouts.items():
        gathers = walk.gathers[name] if stage == 3 else 1  # stages 1 and 2: once, after the update
        shard = layout.shard_numel
        totals.all_gather("dp_shard", shards, "zero.gather", shard_bytes=shard * plan.compute.itemsize, calls=gathers)
        totals.reduce_scatter(
            "dp_shard", shards, "zero.reduce", shard_bytes=shard * sent.itemsize, calls=walk.reductions[name]
        )
        totals.all_reduce(axis, replicas, "zero.replicate", num_bytes=shard * sent.itemsize)
    _partial_sums(plan, totals)


def _partial_sums(plan: RankPlan, totals: Totals) -> None:
    """Once per step, on the shards: what tp ranks saw in part, and a tied embedding whose ends lie on two ranks."""
    size, kv = plan.sizes.tp, plan.config.kv_replicas
    totals.all_reduce("tp", size, "zero.tp_partial", num_bytes=_partial_bytes(plan, "tp"))
    totals.all_reduce("kv", kv, "zero.kv_partial", num_bytes=_partial_bytes(plan, "kv"))
    owners = plan.training.schedule.stage_rank
    if "tied" in plan.layouts and owners[0] != owners[-1]:
        num_bytes = plan.layouts["tied"].shard_numel * plan.main.itemsize
        totals.all_reduce("tied", 2, "zero.tied", num_bytes=num_bytes)


def _partial_bytes(plan: RankPlan, over: str) -> int:
    def partial(run: Run) -> bool:
        return run.slot.spec.tp_reduce == over and run.part.num_replicas > 1

    shard = plan.at["dp_shard"] if plan.num_shards > 1 else 0
    return sum(_covered(layout, shard, partial) for layout in plan.layouts.values()) * plan.main.itemsize


def _covered(layout: FlatLayout, shard: int, keep: Callable[[Run], bool]) -> int:
    return sum(end - begin for begin, end in layout.segments(shard, keep))
