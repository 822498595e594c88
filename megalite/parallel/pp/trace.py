"""Timelines as Chrome trace JSON, which chrome://tracing and ui.perfetto.dev show: one track per pp rank.

Simulated and measured timelines take the same form, so two traces laid into one file (their `traceEvents` joined, with
different `pid`) show where a run leaves its plan. Format: the "Trace Event Format" document, complete (X) events.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megalite.parallel.pp.simulate import Timeline

TraceSpan = tuple[int, str, float, float]
"""(rank, name, start_s, end_s); a name such as 2F0, or that of anything else a rank did, of several words: the first
one, without the numbers around it, is the event's category."""


def trace_events(
    spans: Iterable[TraceSpan],
    *,
    process: str = "measured",
    pid: int = 0,
    names: Mapping[int, str] | None = None,
) -> dict[str, Any]:
    """The trace of these spans.

    Args:
        spans:   in any order; all times from the same start.
        process: the heading of the tracks.
        pid:     tells the tracks of several traces in one file apart.
        names:   of the tracks by rank; default `rank 3`.
    """
    spans = sorted(spans, key=lambda span: (span[0], span[2], -span[3]))
    names = names or {}
    events = [_named("process_name", process, pid)]
    for rank in dict.fromkeys(rank for rank, *_ in spans):
        events.append(_named("thread_name", names.get(rank, f"rank {rank}"), pid, tid=rank))
        events.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": rank, "args": {"sort_index": rank}})
    for rank, name, start_s, end_s in spans:
        times = {"ts": _microseconds(start_s), "dur": _microseconds(end_s - start_s)}
        kind = name.partition(" ")[0].strip("0123456789") or name
        events.append({"ph": "X", "name": name, "cat": kind, "pid": pid, "tid": rank, **times})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _microseconds(time_s: float) -> float:
    """The unit of the format, to a nanosecond."""
    return round(float(time_s) * 1e6, 3)


def _named(what: str, name: str, pid: int, tid: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def joined(*traces: dict[str, Any], **extra: Any) -> dict[str, Any]:
    """Traces of different `pid` in one; `extra` becomes its `otherData`."""
    return {
        "traceEvents": [event for trace in traces for event in trace["traceEvents"]],
        "displayTimeUnit": "ms",
        "otherData": extra,
    }


def timeline_spans(timeline: Timeline, *, unit_s: float = 1e-3) -> Iterator[TraceSpan]:
    """The spans of a simulated timeline whose unit of time stands for `unit_s` seconds."""
    for rank, row in enumerate(timeline.spans):
        for span in row:
            yield rank, str(span.action), float(span.start_s) * unit_s, float(span.end_s) * unit_s


def write_trace(trace: dict[str, Any], path: str | Path) -> None:
    """Write a trace as JSON."""
    Path(path).write_text(json.dumps(trace), encoding="ascii")
