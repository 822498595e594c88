"""The picture of a step that really ran: the bars of a schedule's picture, with the waits laid over them.

A computation's bar begins when its input is there: what was waited for the message is left in the colour of idle
time, since most of that is the bubble. Collectives that block are a strip of their own.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megalite.observe.spans import Span
from megalite.parallel.pp.actions import COMPUTE, parse_action
from megalite.parallel.pp.draw import IDLE, Bar, Frame, action_colour, legend, paint
from megalite.parallel.pp.measured import Step
from megalite.parallel.pp.schedule import Schedule

MAX_ROWS = 32
_COLLECTIVE, _UPDATE = "#c8463c", "#2f8f8a"


def write_measured_picture(schedule: Schedule, step: Step, path: str | Path, *, title: str) -> None:
    """Draw the first MAX_ROWS ranks of a step as a PNG; needs matplotlib."""
    shown = step.spans[:MAX_ROWS]
    pp_rank = {rank: index for pipeline in step.pipelines for index, rank in enumerate(pipeline)}
    bars = [bar for rank, spans in enumerate(shown) for bar in _bars(schedule, rank, pp_rank[rank], spans)]
    left_out = len(step.spans) - len(shown)
    num_actions = max(sum(span.kind == "action" for span in spans) for spans in shown)
    frame = Frame(
        title=title + (f" ({left_out} more ranks are in the trace)" if left_out else ""),
        xlabel="time (ms); the numbers are microbatches",
        rows=[f"rank {rank}" for rank in range(len(shown))],
        length=1e3 * max(span.end_s for spans in step.spans for span in spans),
        legend=[
            *legend(schedule),
            (_UPDATE, "optimizer"),
            (_COLLECTIVE, "collective that blocks"),
            (IDLE, "idle, wait for a message, other"),
        ],
        inches=min(40.0, max(12.0, 0.15 * num_actions + 1.5)),
    )
    paint(bars, frame, path, form="png")


def _bars(schedule: Schedule, rank: int, pp_rank: int, spans: Sequence[Span]) -> list[Bar]:
    """The bars of one rank, in the order in which they lie over each other."""
    found: list[Bar] = []
    for span in spans:
        start, length = 1e3 * span.start_s, 1e3 * (span.end_s - span.start_s)
        if span.kind == "action" and (action := parse_action(span.name)).op in COMPUTE:
            found.append(Bar(rank, start, length, action_colour(schedule, pp_rank, action), str(action.mb)))
        elif span.kind == "update":
            found.append(Bar(rank, start, length, _UPDATE))
        elif span.kind == "message" and found and start < (end := found[-1].start + found[-1].length):
            arrived = start + length  # a computation begins with the wait for its input
            found[-1] = replace(found[-1], start=arrived, length=max(end - arrived, 0.0))
        elif span.kind == "collective":
            found.append(Bar(rank + 0.36, start, length, _COLLECTIVE, height=0.14))
    return found
