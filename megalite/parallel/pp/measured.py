"""What the spans of all ranks say about a step that really ran: where its time went, and its schedule's timeline.

[Note: shares] Of each rank's time between begin and end of its step:
- compute: inside of F, B, I, W actions and the optimizer's update, without the waits in there;
- bubble: waits for a message until its sender posted it, and waits of closing collectives over pipeline ranks (the
  tied embedding's, and the step's scalars) until the last rank has come to them, where there is a pipeline;
- exposed communication: all other waits for messages and collectives;
- other: the rest, e.g. zeroing gradients, the norm, posting messages, Python between actions.
They sum to one on each rank, and a step's shares are their means over ranks. On a CPU a transport's threads compete
with the computation for cores, which is in `compute`.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megalite.observe.spans import Span
from megalite.parallel.pp.actions import COMPUTE, RECVS, Action, Op, parse_action, partner
from megalite.parallel.pp.lower import Lowered
from megalite.parallel.pp.simulate import Timeline, simulate
from megalite.parallel.pp.trace import TraceSpan, timeline_spans

WAITS = ("message", "collective")
CLOSING = ("step.scalars world", "zero.tied tied")
"""Collectives of all pipeline ranks resp. of the first and the last one, at the end of a step."""


@dataclass(frozen=True)
class Shares:
    """Fractions of a step, see [Note: shares]."""

    compute: float
    bubble: float
    exposed: float
    other: float

    def text(self) -> str:
        """One line."""
        return (
            f"compute {100 * self.compute:.1f}%, bubble {100 * self.bubble:.1f}%, exposed communication "
            f"{100 * self.exposed:.1f}%, other {100 * self.other:.1f}%"
        )


@dataclass(frozen=True)
class Step:
    """A step as all ranks saw it.

    Args:
        spans:     of each global rank, on one clock.
        pipelines: global ranks of each pipeline, in pp order.
    """

    spans: Sequence[Sequence[Span]]
    pipelines: Sequence[Sequence[int]]

    def shares(self) -> Shares:
        """Means over ranks."""
        found = [self._rank_shares(rank) for rank in range(len(self.spans))]
        return Shares(*(sum(values) / len(found) for values in zip(*found, strict=True)))

    def _rank_shares(self, rank: int) -> tuple[float, float, float, float]:
        spans = self.spans[rank]
        step = next(span for span in spans if span.kind == "step")
        waits = [span for span in spans if span.kind in WAITS]
        computes = [span for span in spans if _computes(span)]
        waiting, either = _length(_merged(waits)), _length(_merged([*waits, *computes]))
        pipeline = next(ranks for ranks in self.pipelines if rank in ranks)
        bubble = sum(self._idle_s(span, pipeline) for span in waits) if len(pipeline) > 1 else 0.0
        length = step.end_s - step.start_s
        parts = (either - waiting, bubble, waiting - bubble)
        return tuple(part / length for part in (*parts, length - sum(parts)))

    def _idle_s(self, wait: Span, pipeline: Sequence[int]) -> float:
        """The part of a wait that belongs to the bubble."""
        until = wait.start_s
        if wait.kind == "message":
            receive = parse_action(wait.name.removeprefix("wait "))
            if receive.op in RECVS:  # the end of a send is its transfer's
                send = str(partner(receive))
                until = next(self._starts[rank, send] for rank in pipeline if (rank, send) in self._starts)
        elif wait.name in CLOSING:
            ranks = range(len(self.spans)) if wait.name == CLOSING[0] else (pipeline[0], pipeline[-1])
            until = max(self._starts[rank, wait.name] for rank in ranks)
        return min(max(until - wait.start_s, 0.0), wait.end_s - wait.start_s)

    @cached_property
    def _starts(self) -> dict[tuple[int, str], float]:
        """When a rank came to an action or a closing collective."""
        return {
            (rank, span.name): span.start_s
            for rank, spans in enumerate(self.spans)
            for span in spans
            if span.kind == "action" or span.name in CLOSING
        }

    def planned(self, lowered: Lowered) -> "Plan":
        """The schedule simulated with free messages and this step's mean length, without waits, of each computation."""
        lengths: dict[tuple[Op, int], list[float]] = {}
        for spans in self.spans:
            for action, length in _lengths(spans):
                lengths.setdefault((action.op, action.stage), []).append(length)
        stages = range(lowered.schedule.num_stages)
        costs = {op: [_mean(lengths.get((op, stage), [])) for stage in stages] for op in COMPUTE}
        timeline = simulate(
            lowered, forward_s=costs[Op.F], backward_s=costs[Op.B], input_s=costs[Op.I], weight_s=costs[Op.W]
        )
        return Plan(timeline, [self._update_s(ranks) for ranks in zip(*self.pipelines, strict=True)], self._begin_s())

    def _update_s(self, ranks: Iterable[int]) -> float:
        """The mean length of these ranks' updates; 0 of a skipped step."""
        spans = [span for rank in ranks for span in self.spans[rank] if span.kind == "update"]
        return _mean([span.end_s - span.start_s for span in spans])

    def _begin_s(self) -> float:
        """When the first forward of the first stage began."""
        actions = ((parse_action(s.name), s.start_s) for spans in self.spans for s in spans if s.kind == "action")
        return min((start_s for action, start_s in actions if (action.op, action.stage) == (Op.F, 0)), default=0.0)


@dataclass(frozen=True)
class Plan:
    """How a measured step would have run if nothing had made anybody wait but the schedule.

    Args:
        timeline: the simulated schedule, from 0.
        update_s: length of each pp rank's update, which begins when all ranks are through.
        begin_s:  where 0 lies on the clock of the measured step: at its first forward.
    """

    timeline: Timeline
    update_s: Sequence[float]
    begin_s: float = 0.0

    @property
    def end_s(self) -> float:
        """Of the longest update, on the measured step's clock."""
        return self.begin_s + self.timeline.makespan_s + max(self.update_s)

    def shares(self) -> Shares:
        """Means over pp ranks; all that is not computed is the bubble."""
        whole = self.timeline.makespan_s
        found = [(self.timeline.busy_s(rank) + update) / (whole + update) for rank, update in enumerate(self.update_s)]
        return Shares(_mean(found), 1 - _mean(found), 0.0, 0.0)

    def spans(self) -> list[list[Span]]:
        """Of each pp rank, on the measured step's clock."""
        rows: list[list[Span]] = [[] for _ in self.update_s]
        for rank, name, start_s, end_s in timeline_spans(self.timeline, unit_s=1.0):
            rows[rank].append(Span(name, "action", start_s, end_s))
        end_s = self.timeline.makespan_s
        for row, length in zip(rows, self.update_s, strict=True):
            row += [Span("optimizer", "update", end_s, end_s + length)] if length else []
        return [shifted(row, self.begin_s) for row in rows]


def trace_spans(rows: Sequence[Sequence[Span]]) -> Iterator[TraceSpan]:
    """All spans of all ranks, for a trace."""
    for rank, spans in enumerate(rows):
        for span in spans:
            yield rank, span.name, span.start_s, span.end_s


def shifted(spans: Iterable[Span], by_s: float) -> list[Span]:
    """The spans on another clock."""
    return [replace(span, start_s=span.start_s + by_s, end_s=span.end_s + by_s) for span in spans]


def executed(spans: Iterable[Span]) -> list[Action]:
    """The actions in the order in which they ran."""
    return [parse_action(span.name) for span in spans if span.kind == "action"]


def _computes(span: Span) -> bool:
    return span.kind == "update" or (span.kind == "action" and parse_action(span.name).op in COMPUTE)


def _lengths(spans: Sequence[Span]) -> Iterator[tuple[Action, float]]:
    """Each computation with its length without the waits in it."""
    waits = sorted((span for span in spans if span.kind in WAITS), key=lambda span: span.start_s)
    starts = [span.start_s for span in waits]
    for span in spans:
        if span.kind == "action" and (action := parse_action(span.name)).op in COMPUTE:
            began = waits[bisect_left(starts, span.start_s) : bisect_right(starts, span.end_s)]
            inside = _length(_merged(wait for wait in began if wait.end_s <= span.end_s))
            yield action, span.end_s - span.start_s - inside


def _merged(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """The times that some span covers, as disjoint intervals."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted((span.start_s, span.end_s) for span in spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _length(intervals: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
