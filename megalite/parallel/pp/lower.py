"""Lowering: from what each pp rank computes to everything it does, with messages, gathers and reductions in place.

Invariant: there is one global order of all messages, and every rank lists its own messages in that order. So any two
ranks agree on the order of their messages (both directions), and the lists can't deadlock, not even if a rank stood
still at every SEND until the other end arrives and all its messages passed through one queue: the earliest unfinished
message waits for computations that wait for earlier messages only.

[Note: the order of messages] The schedule is played with nominal costs. A message happens when its producer finishes,
at time t; ties follow a fixed key. The sender lists it right after the producer. The receiver lists it one computation
ahead of its first computation that starts at t or later, but behind its earlier messages: the message then travels
under a computation that does not need it, also where posting happens between computations only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megalite.parallel.pp.actions import COMPUTE, RECVS, Action, Op, Rows, output_key, partner, producer
from megalite.parallel.pp.schedule import Schedule

ReshardAfter = Literal["forward", "microbatch", "step"]
ReduceEach = Literal["microbatch", "step"]

_BACKWARD_ENDS = (Op.B, Op.W)
"""The ops after which a stage is done with a microbatch; a stage may split some backwards and not others."""

NOMINAL_COST = {Op.F: 1, Op.B: 2, Op.I: 1, Op.W: 1}
"""Relative lengths that fix the order of messages; any positive numbers give a correct order."""


@dataclass(frozen=True)
class Lowered:
    """Everything each pp rank does, in order, and the promises it was made for."""

    schedule: Schedule
    actions: Rows
    zero_stage: int
    reshard_after: ReshardAfter
    reduce_each: ReduceEach


def lower(schedule: Schedule, *, zero_stage: int, reshard_after: ReshardAfter, reduce_each: ReduceEach) -> Lowered:
    """Insert SEND/RECV, GATHER/RESHARD (ZeRO stage 3) and REDUCE into `schedule`.

    Args:
        schedule:      compute actions per rank.
        zero_stage:    below 3 parameters are never gathered or freed.
        reshard_after: stage 3: `forward` frees after every F and B (but between an F and a backward of its stage right
                       behind it), `microbatch` when no microbatch of the stage is between its F and its backward,
                       `step` after the stage's last action.
        reduce_each:   reduce after the backward of each microbatch, or once after the stage's last backward.
    """
    messages = _message_slots(schedule)
    rows = []
    for rank, computes in enumerate(schedule.actions):
        gathers = _gather_slots(computes, reshard_after, schedule.forward_only) if zero_stage == 3 else {}
        reduces = {} if schedule.forward_only else _reduce_slots(computes, reduce_each)
        row: list[Action] = []
        for slot in range(len(computes) + 1):
            row += messages[rank].get(slot, [])
            row += gathers.get(slot, [])
            row += reduces.get(slot, [])
            row += computes[slot : slot + 1]
        rows.append(tuple(row))
    return Lowered(schedule, tuple(rows), zero_stage, reshard_after, reduce_each)


Slots = dict[int, list[Action]]
"""What is inserted before the k-th computation of a rank (k = their number: at the end)."""


def _play(schedule: Schedule) -> tuple[list[list[int]], dict[Action, int]]:
    """Nominal start times per rank, and when each output is ready."""
    starts: list[list[int]] = [[] for _ in range(schedule.pp)]
    clock = [0] * schedule.pp
    ready: dict[Action, int] = {}
    moved = True
    while moved:
        moved = False
        for rank, computes in enumerate(schedule.actions):
            while len(starts[rank]) < len(computes):
                action = computes[len(starts[rank])]
                needs = producer(action, schedule.num_stages)
                if needs is not None and needs not in ready:
                    break
                starts[rank].append(max(clock[rank], ready[needs] if needs else 0))
                clock[rank] = starts[rank][-1] + NOMINAL_COST[action.op]
                if (key := output_key(action)) is not None:
                    ready[key] = clock[rank]
                moved = True
    for rank, computes in enumerate(schedule.actions):
        if len(starts[rank]) < len(computes):
            stuck = computes[len(starts[rank])]
            raise ValueError(f"schedule {schedule.name}: rank {rank} can't start {stuck}: nothing produces its input")
    return starts, ready


def _message_slots(schedule: Schedule) -> list[Slots]:
    """Where each rank posts its sends and receives."""
    starts, ready = _play(schedule)
    slots: list[Slots] = [{} for _ in range(schedule.pp)]
    next_slot = [0] * schedule.pp
    last_slot = [0] * schedule.pp
    sends = _sends(schedule, ready)
    for time, send in sorted(sends, key=lambda item: (item[0], item[1].op, item[1].stage, item[1].mb)):
        for end in (send, partner(send)):
            rank = schedule.stage_rank[end.stage]
            while next_slot[rank] < len(starts[rank]) and starts[rank][next_slot[rank]] < time:
                next_slot[rank] += 1
            ahead = 1 if end.op in RECVS else 0
            last_slot[rank] = max(last_slot[rank], next_slot[rank] - ahead)
            slots[rank].setdefault(last_slot[rank], []).append(end)
    return slots


def _sends(schedule: Schedule, ready: dict[Action, int]) -> list[tuple[int, Action]]:
    """(time, SEND) of each output that another rank consumes."""
    sends = []
    for output, time in ready.items():
        send = Action(Op.SEND_F if output.op is Op.F else Op.SEND_B, output.stage, output.mb)
        to = partner(send).stage
        if 0 <= to < schedule.num_stages and schedule.stage_rank[to] != schedule.stage_rank[output.stage]:
            sends.append((time, send))
    return sends


def _gather_slots(computes: tuple[Action, ...], reshard_after: ReshardAfter, forward_only: bool) -> Slots:
    """Where a rank gathers and frees parameters; RESHARDs of a slot come before its GATHERs.

    Each GATHER goes one computation ahead of its first use, unless the stage is still gathered from before. A
    computation uses one stage, so at most one gather is ahead at any time: one more stage is held than without.
    """
    intervals = _INTERVALS[reshard_after](computes, forward_only)
    reshards: Slots = {}
    gathers: Slots = {}
    freed: dict[int, int] = {}
    for first, end in sorted(intervals):
        stage = computes[first].stage
        slot = max(first - 1, freed.get(stage, 0))
        gathers.setdefault(slot, []).append(Action(Op.GATHER, stage))
        reshards.setdefault(end, []).append(Action(Op.RESHARD, stage))
        freed[stage] = end
    return {slot: reshards.get(slot, []) + gathers.get(slot, []) for slot in {*reshards, *gathers}}


Intervals = list[tuple[int, int]]
"""Half-open ranges of computations over which the stage of the first one is gathered."""


def _each_use(computes: tuple[Action, ...], forward_only: bool) -> Intervals:
    """`forward`: around each F, B and I; a W reads activations and gradients only. A backward right behind a forward of
    its stage goes with it: it begins with the link that the forward ended with."""
    intervals: Intervals = []
    for index, action in enumerate(computes):
        before = computes[index - 1] if index else None
        if before is not None and before.op is Op.F and before.stage == action.stage and action.op in (Op.B, Op.I):
            intervals[-1] = (index - 1, index + 1)
        elif action.op is not Op.W:
            intervals.append((index, index + 1))
    return intervals


def _while_in_flight(computes: tuple[Action, ...], forward_only: bool) -> Intervals:
    """`microbatch`: from the F of the first microbatch in flight to the backward of the last."""
    ends = (Op.F,) if forward_only else _BACKWARD_ENDS
    opened: dict[int, int] = {}
    flying: dict[int, int] = {}
    intervals = []
    for index, action in enumerate(computes):
        stage = action.stage
        if action.op is Op.F:
            opened.setdefault(stage, index)
            flying[stage] = flying.get(stage, 0) + 1
        if action.op in ends:
            flying[stage] -= 1
            if flying[stage] == 0:
                intervals.append((opened.pop(stage), index + 1))
    return intervals


def _whole_step(computes: tuple[Action, ...], forward_only: bool) -> Intervals:
    """`step`: from the first to the last use."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, action in enumerate(computes):
        first.setdefault(action.stage, index)
        last[action.stage] = index + 1
    return [(first[stage], last[stage]) for stage in first]


_INTERVALS: dict[str, Callable[[tuple[Action, ...], bool], Intervals]] = {
    "forward": _each_use,
    "microbatch": _while_in_flight,
    "step": _whole_step,
}


def _reduce_slots(computes: tuple[Action, ...], reduce_each: ReduceEach) -> Slots:
    """Where a rank reduces gradients: behind the B or W that made them complete."""
    ends = [(index, action) for index, action in enumerate(computes) if action.op in _BACKWARD_ENDS]
    if reduce_each == "microbatch":
        return {index + 1: [Action(Op.REDUCE, action.stage, action.mb)] for index, action in ends}
    last = {action.stage: index for index, action in ends}
    return {index + 1: [Action(Op.REDUCE, stage)] for stage, index in last.items()}


def computes_of(rows: Rows) -> Rows:
    """The compute actions alone."""
    return tuple(tuple(action for action in row if action.op in COMPUTE) for row in rows)
