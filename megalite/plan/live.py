"""Gathered parameters of a rank, counted by walking its lowered schedule: how many bytes live, how often units move.

A second account of what parallel/zero does, written down from its rules and not from its code, so that each checks the
other: `peak_bytes` and the numbers of gathers and reductions equal a run's exactly (tests/dist/test_plan_ledger.py).
[Note: a bound that is kept] A link can't run without its units: that gather always happens. A prefetch of streaming
(reshard_after=forward) happens only while there is room for it and for what other links need until it is used. So the
peak with a bound is at most the bound, if the peak without any prefetch is. The other policies hold all stages of a
rank at some time in any schedule: the backward of a later stage lies between forward and backward of an earlier one.
"""

from collections import Counter
from dataclasses import dataclass, field

from megalite.config.schema import Config
from megalite.parallel.pp.actions import Action, Op
from megalite.parallel.pp.lower import Lowered
from megalite.parallel.zero.manager import LinkUnits
from megalite.plan.units import RankPlan, lowered, plan_rank

BACKWARD = (Op.B, Op.I)


@dataclass
class Walk:
    """The state of a rank's units between two actions, and what has happened so far.

    bound: None: prefetches always happen; 0: never.
    """

    rank: RankPlan
    bound: int | None
    live: set[str] = field(default_factory=set)
    held: dict[str, set[int]] = field(default_factory=dict)
    open_grads: set[str] = field(default_factory=set)
    peak_bytes: int = 0
    gathers: Counter = field(default_factory=Counter)
    """Unit -> number of gathers."""
    reductions: Counter = field(default_factory=Counter)
    """Unit -> number of reductions over the shards."""

    def __post_init__(self) -> None:
        zero = self.rank.config.zero
        self.streams = zero.reshard_after == "forward"
        self.frees = zero.stage == 3 and self.rank.num_shards > 1
        if not self.frees:
            self.live = set(self.rank.layouts)
        if zero.reduce_each == "step":
            self.open_grads = set(self.rank.layouts)
        self.largest = max((self._bytes(link.reads) for links in self.rank.links.values() for link in links), default=0)

    def run(self, schedule: Lowered) -> "Walk":
        """Walk this rank's row of a lowered schedule."""
        row = schedule.actions[self.rank.at["pp"]]
        closing = _closing(row)
        for index, action in enumerate(row):
            links = self.rank.links[action.stage]
            if action.op is Op.GATHER:
                self._prefetch_stage(action.stage, links, backward=_next_use(row, index) in BACKWARD)
            elif action.op is Op.RESHARD:
                for link in links:
                    self._release(action.stage, link.reads)
            elif action.op is Op.F:
                self._chain(links)
            elif action.op in BACKWARD:
                self._chain(links[::-1], split=action.op is Op.I, backward=True, reduces=action in closing)
            elif action.op is Op.W:
                self._weights(links, reduces=action in closing)
        return self

    def _chain(
        self, links: list[LinkUnits], *, backward: bool = False, split: bool = False, reduces: bool = False
    ) -> None:
        for position, link in enumerate(links):
            self._gather(link.needs(backward=backward))
            if backward and not (split and _is_block(link)):
                self.open_grads.update(link.reads)
            ahead = links[position + 1].needs(backward=backward) if position + 1 < len(links) else ()
            if self._has_room(self._bytes(self.live | set(ahead))):
                self._gather(ahead)
            if backward or not self._stays(links, position):
                self._free([name for name in link.reads if not self.held.get(name) and name not in ahead])
            if reduces:
                self._reduce(link)

    def _stays(self, links: list[LinkUnits], position: int) -> bool:
        """The last link of a forward is left to RESHARD, the one before too if its backward needs it and both fit."""
        if position == len(links) - 2:
            return links[position].backward_reads and self.live.issuperset(links[-1].reads)
        return position == len(links) - 1

    def _weights(self, links: list[LinkUnits], *, reduces: bool) -> None:
        for link in links[::-1]:
            self.open_grads.update(link.reads if _is_block(link) else ())
            if reduces:
                self._reduce(link)

    def _reduce(self, link: LinkUnits) -> None:
        """A unit that no backward has added to since its last reduction is left alone."""
        for name in link.reduces:
            self.reductions[name] += name in self.open_grads
            if self.rank.config.zero.reduce_each == "microbatch":
                self.open_grads.discard(name)

    def _prefetch_stage(self, stage: int, links: list[LinkUnits], *, backward: bool) -> None:
        links = links[::-1] if backward else links
        if self.streams:
            ahead = links[0].needs(backward=backward) if links else ()
            if self._has_room(self._bytes(self.live | set(ahead)) + self.largest):
                self._gather(ahead)
            return
        for link in links:
            for name in link.reads:
                self.held.setdefault(name, set()).add(stage)
            self._gather(link.reads)

    def _release(self, stage: int, names: tuple[str, ...]) -> None:
        for name in names:
            self.held.setdefault(name, set()).discard(stage)
        self._free([name for name in names if not self.held[name]])

    def _gather(self, names) -> None:
        for name in names:
            self.gathers[name] += name not in self.live
            self.live.add(name)
        self.peak_bytes = max(self.peak_bytes, self._bytes(self.live))

    def _free(self, names) -> None:
        if self.frees:
            self.live.difference_update(names)

    def _bytes(self, names) -> int:
        return sum(map(self.rank.full_bytes, names))

    def _has_room(self, num_bytes: int) -> bool:
        return self.bound is None or num_bytes <= self.bound


def _is_block(link: LinkUnits) -> bool:
    return link.reads[0].startswith("layers.")


def _next_use(row: tuple[Action, ...], index: int) -> Op | None:
    """What the stage of a GATHER runs next that reads parameters."""
    stage = row[index].stage
    return next((a.op for a in row[index:] if a.stage == stage and a.op in (Op.F, *BACKWARD)), None)


def _closing(row: tuple[Action, ...]) -> set[Action]:
    """The B and W actions right behind which their stage is reduced."""
    last: dict[int, Action] = {}
    found = set()
    for action in row:
        if action.op in (Op.B, Op.W):
            last[action.stage] = action
        elif action.op is Op.REDUCE:
            found.add(last[action.stage])
    return found


def peak_live_bytes(config: Config, *, rank: int = 0) -> int:
    """The most bytes of gathered parameters (compute dtype) that a rank holds at once, in training steps."""
    plan = plan_rank(config, rank=rank)
    return Walk(plan, config.zero.max_live_bytes).run(plan.training).peak_bytes


def least_live_bytes(config: Config) -> tuple[int, int]:
    """The least bound that can be kept, and the pp rank that needs it: the largest peak over ranks, in training and
    evaluation, with no prefetch at all."""
    schedules = [lowered(config, train=train) for train in (True, False)]
    plans = [RankPlan(config, pp * config.dp * config.mesh.tp, schedules[0]) for pp in range(config.mesh.pp)]
    peaks = [max(Walk(plan, 0).run(schedule).peak_bytes for schedule in schedules) for plan in plans]
    return max(peaks), peaks.index(max(peaks))


def check_live_bytes(config: Config) -> None:
    """Refuse a zero.max_live_bytes that some rank of the layout can't keep; all ranks of a job find the same.

    Raises:
        ValueError: with the rank, its bytes, and a setting that works.
    """
    bound = config.zero.max_live_bytes
    if bound is None:
        return
    least, pp = least_live_bytes(config)
    if least <= bound:
        return
    policy = config.zero.reshard_after
    ways = f"use zero.max_live_bytes={least} or more"
    if policy == "forward":
        holds = "one link of the model needs"
    else:
        streamed = config.model_copy(update={"zero": config.zero.model_copy(update={"reshard_after": "forward"})})
        fewest, _ = least_live_bytes(streamed)
        holds = f"zero.reshard_after={policy} holds at once"
        ways += ", or zero.reshard_after=forward" + ("" if fewest <= bound else f" with {fewest} or more")
    raise ValueError(f"zero.max_live_bytes={bound} is less than the {least} bytes that {holds} on pp rank {pp}; {ways}")
