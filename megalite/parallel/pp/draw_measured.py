"""The picture of a step that really ran, over the same schedule simulated with the lengths that were measured.

Both panels have one scale of time, so that they can be laid over one another. A computation's measured bar begins when
its input is there: what was waited for the message is left in the colour of idle time, since most of that is the
bubble. Collectives that block are a strip of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megalite.observe.spans import Span
from megalite.parallel.pp.actions import COMPUTE, parse_action
from megalite.parallel.pp.draw import IDLE, Bar, action_colour, draw_bars, legend
from megalite.parallel.pp.measured import Plan, Step
from megalite.parallel.pp.schedule import Schedule

MAX_ROWS = 32
_COLLECTIVE, _UPDATE = "#c8463c", "#2f8f8a"


@dataclass(frozen=True)
class Panel:
    """Rows of bars under a title; times in ms."""

    title: str
    rows: Sequence[str]
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Picture:
    """Panels over each other, on one axis of time from 0 to `length`."""

    panels: Sequence[Panel]
    length: float
    inches: float
    legend: Sequence[tuple[str, str]]

    @property
    def points_per_unit(self) -> float:
        """About the width of a millisecond."""
        return 72 * (self.inches - 2.5) / self.length


def write_measured_picture(
    schedule: Schedule, step: Step, plan: Plan | None, path: str | Path, *, title: str, names: Sequence[str]
) -> None:
    """Draw the first MAX_ROWS ranks of a step as a PNG, and the plan below them; needs matplotlib.

    Args:
        title: of the measured step, with its shares where there are any.
        names: of the ranks.
    """
    shown, left_out = step.spans[:MAX_ROWS], len(step.spans[MAX_ROWS:])
    title += f" ({left_out} more ranks are in the trace)" if left_out else ""
    pp_ranks = {rank: index for pipeline in step.pipelines for index, rank in enumerate(pipeline)}
    panels = [Panel(title, names[: len(shown)], _all_bars(schedule, shown, [pp_ranks[r] for r in range(len(shown))]))]
    if plan:
        rows, own = plan.spans(), range(schedule.pp)
        title = f"the same schedule simulated with the measured lengths: {plan.shares().text()}"
        bars = _all_bars(schedule, rows, own, begin_s=plan.begin_s)
        panels.append(Panel(title, [f"pp {rank}" for rank in own], bars))
    ends = [span.end_s for spans in step.spans for span in spans] + ([plan.end_s] if plan else [])
    most = max(len(row) for row in schedule.actions)
    meanings = [(_UPDATE, "optimizer"), (_COLLECTIVE, "collective that blocks")]
    meanings += [(IDLE, "idle, wait for a message, other")]
    paint(
        Picture(panels, 1e3 * max(ends), min(40.0, max(12.0, 0.25 * most + 2.5)), [*legend(schedule), *meanings]), path
    )


def _all_bars(
    schedule: Schedule, rows: Sequence[Sequence[Span]], pp_ranks: Sequence[int], *, begin_s: float | None = None
) -> list[Bar]:
    """The bars of all rows, each over idle time from begin_s, or the row's first begin, to its last end."""
    found: list[Bar] = []
    for row, (spans, pp_rank) in enumerate(zip(rows, pp_ranks, strict=True)):
        begin = 1e3 * (min(span.start_s for span in spans) if begin_s is None else begin_s)
        end = 1e3 * max(span.end_s for span in spans)
        found += [Bar(row, begin, end - begin, IDLE), *_bars(schedule, row, pp_rank, spans)]
    return found


def _bars(schedule: Schedule, row: int, pp_rank: int, spans: Sequence[Span]) -> list[Bar]:
    """The bars of one rank, in the order in which they lie over each other."""
    found: list[Bar] = []
    for span in spans:
        start, length = 1e3 * span.start_s, 1e3 * (span.end_s - span.start_s)
        if span.kind == "action" and (action := parse_action(span.name)).op in COMPUTE:
            found.append(Bar(row, start, length, action_colour(schedule, pp_rank, action), str(action.mb)))
        elif span.kind == "update":
            found.append(Bar(row, start, length, _UPDATE))
        elif span.kind == "message" and found and start < (end := found[-1].start + found[-1].length):
            arrived = start + length  # a computation begins with the wait for its input
            found[-1] = replace(found[-1], start=arrived, length=max(end - arrived, 0.0))
        elif span.kind == "collective":
            found.append(Bar(row + 0.36, start, length, _COLLECTIVE, height=0.14))
    return found


def paint(picture: Picture, path: str | Path) -> None:
    """Draw the panels and write the PNG."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    heights = [len(panel.rows) for panel in picture.panels]
    size = (picture.inches, 0.42 * sum(heights) + 0.5 * len(heights) + 1.0)
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    grid = figure.subplots(len(heights), squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    numbered = [_draw_panel(axes, panel, picture) for axes, panel in zip(grid, picture.panels, strict=True)]
    grid[-1].tick_params(axis="x", bottom=True, labelbottom=True)
    grid[-1].set_xlabel("time (ms)" + ("; the numbers are microbatches" if any(numbered) else ""), fontsize=9)
    patches = [Patch(facecolor=c, label=text, edgecolor="#c4c4c4", linewidth=0.6) for c, text in picture.legend]
    columns = 5 if picture.inches < 18 else 9
    figure.legend(handles=patches, loc="outside lower left", ncols=columns, fontsize=8, frameon=False)
    figure.savefig(path, format="png")


def _draw_panel(axes, panel: Panel, picture: Picture) -> bool:
    """Draw one panel; whether it has numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(0, picture.length)
    axes.set_ylim(len(panel.rows) - 0.5, -0.5)
    numbered = draw_bars(axes, panel.bars, points_per_unit=picture.points_per_unit)
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.set_yticks(range(len(panel.rows)), panel.rows)
    axes.tick_params(length=0, labelsize=9)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12 if picture.inches < 14 else 24))
    for side in axes.spines.values():
        side.set_visible(False)
    return numbered
