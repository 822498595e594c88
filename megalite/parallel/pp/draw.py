"""Pictures of a schedule: a text grid and a PNG or SVG, all from the same timeline.

The text grid has one row per pp rank and one column per unit of time; an action stands where it starts, `=` fills the
rest of its time, `.` is idle time. The picture has a bar per action, coloured by op, darker for later chunks of a rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Literal

from megalite.parallel.pp.actions import Action, Op
from megalite.parallel.pp.schedule import Schedule, counted
from megalite.parallel.pp.simulate import Span, Timeline

_STYLES = {Op.F: "cyan", Op.B: "green", Op.I: "yellow", Op.W: "magenta"}
_COLOURS = {Op.F: "#4c8fd6", Op.B: "#5aab61", Op.I: "#e0a33c", Op.W: "#a873c4"}
IDLE = "#f0f0f0"
_MEANINGS = {Op.F: "forward", Op.B: "backward", Op.I: "input gradient", Op.W: "weight gradient"}


def text_grid(timeline: Timeline, *, columns: int = 120, markup: bool = False) -> str:
    """The timeline as text, cut into blocks of at most `columns` characters.

    Args:
        timeline: times must be whole numbers (simulate with integer costs).
        columns:  width of a block.
        markup:   wrap actions in rich markup (colours); off: plain text.
    """
    length = int(timeline.makespan_s)
    width = 1 + max([len(str(span.action)) for row in timeline.spans for span in row] + [len(str(length))])
    label = len(f"rank {len(timeline.spans) - 1}") + 1
    num_blocks = ceil(length / max(1, (columns - label) // width))
    per_block = ceil(length / num_blocks)
    cells = [_cells(row, length) for row in timeline.spans]
    blocks = []
    for start in range(0, length, per_block):
        times = range(start, min(start + per_block, length))
        lines = ["time".ljust(label) + "".join(str(time).ljust(width) for time in times)]
        for rank, row in enumerate(cells):
            drawn = (_draw_cell(text, op if markup else None, width) for text, op in (row[time] for time in times))
            lines.append(f"rank {rank}".ljust(label) + "".join(drawn))
        blocks.append("\n".join(line.rstrip() for line in lines))
    return "\n\n".join(blocks) + "\n"


def _cells(row: tuple[Span, ...], length: int) -> list[tuple[str, Op | None]]:
    """(text, op) of each unit of time of one rank."""
    cells: list[tuple[str, Op | None]] = [(".", None)] * length
    for span in row:
        start, end = int(span.start_s), int(span.end_s)
        if (start, end) != (span.start_s, span.end_s):
            raise ValueError(f"text grid: {span.action} runs from {span.start_s} to {span.end_s}; use whole costs")
        cells[start:end] = [(str(span.action), span.action.op)] + [("=", span.action.op)] * (end - start - 1)
    return cells


def _draw_cell(text: str, op: Op | None, width: int) -> str:
    """One cell, filled to its width; `=` runs on to the next cell."""
    filled = text * (width - 1) if text == "=" else text
    padding = " " * (width - len(filled))
    return f"[{_STYLES[op]}]{filled}[/]{padding}" if op else filled + padding


@dataclass(frozen=True)
class Bar:
    """One rectangle of a picture: in a row, over a time, with an optional text."""

    row: float
    start: float
    length: float
    colour: str
    text: str = ""
    height: float = 0.86


@dataclass(frozen=True)
class Frame:
    """What surrounds the bars."""

    title: str
    xlabel: str
    rows: list[str]
    length: float
    legend: list[tuple[str, str]]
    """(colour, text)."""
    inches: float

    @property
    def points_per_unit(self) -> float:
        """Width of a unit of time."""
        return 72 * (self.inches - 1.2) / self.length


def write_picture(
    schedule: Schedule, timeline: Timeline, path: str | Path, *, form: Literal["png", "svg"], shares: str = ""
) -> None:
    """Draw the timeline; needs matplotlib. Microbatch numbers are left out where they would not fit.

    Args:
        shares: where the step's time goes, for the title.
    """
    length = float(timeline.makespan_s)
    bars = [
        Bar(rank, float(span.start_s), float(span.end_s - span.start_s), action_colour(schedule, rank, span.action),
            str(span.action.mb))
        for rank, row in enumerate(timeline.spans)
        for span in row
    ]  # fmt: skip
    frame = Frame(
        title=_title(schedule) + (f"\n{shares}" if shares else ""),
        xlabel="time (units of the costs)",
        rows=[f"rank {rank}" for rank in range(schedule.pp)],
        length=length,
        legend=[*legend(schedule), (IDLE, "idle")],
        inches=min(40.0, max(8.0, 0.22 * length + 1.5)),
    )
    paint(bars, frame, path, form=form)


def action_colour(schedule: Schedule, rank: int, action: Action) -> str:
    """By op, darker for later chunks of a rank."""
    stages = schedule.stages_of(rank)
    return _shade(_COLOURS[action.op], stages.index(action.stage), len(stages))


def paint(bars: list[Bar], frame: Frame, path: str | Path, *, form: Literal["png", "svg"]) -> None:
    """Draw bars and write the picture."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(frame.inches, 0.5 * len(frame.rows) + 1.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    numbered = draw_bars(axes, bars, points_per_unit=frame.points_per_unit)
    axes.set_title(frame.title, fontsize=11, loc="left")
    axes.set_xlim(0, frame.length)
    axes.set_ylim(len(frame.rows) - 0.5, -0.5)
    axes.set_yticks(range(len(frame.rows)), frame.rows)
    axes.set_xlabel(frame.xlabel + ("; the numbers are microbatches" if numbered else ""), fontsize=9)
    axes.set_facecolor(IDLE)
    axes.tick_params(length=0, labelsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12 if frame.inches < 14 else 24, integer=True))
    for side in axes.spines.values():
        side.set_visible(False)
    patches = [Patch(facecolor=colour, label=text, edgecolor="#c4c4c4", linewidth=0.6) for colour, text in frame.legend]
    columns = 5 if frame.inches < 14 else 9
    figure.legend(handles=patches, loc="outside lower left", ncols=columns, fontsize=8, frameon=False)
    figure.savefig(path, format=form)


def draw_bars(axes, bars: Sequence[Bar], *, points_per_unit: float) -> bool:
    """Draw bars, later ones over earlier ones, with the texts that fit into them; False when none does.

    White edges take at most a tenth of a bar.
    """
    from matplotlib.collections import PolyCollection

    widths = [min(0.8, 0.1 * bar.length * points_per_unit) for bar in bars]
    colours = [bar.colour for bar in bars]
    corners = list(map(_corners, bars))  # one artist for all: a patch each would take minutes for a large run
    axes.add_collection(
        PolyCollection(corners, facecolors=colours, edgecolors="white", linewidths=widths), autolim=False
    )
    fitting = [bar for bar in bars if bar.text and bar.length * points_per_unit > 6 * len(bar.text) + 1]
    for bar in fitting:
        axes.text(bar.start + bar.length / 2, bar.row, bar.text, ha="center", va="center", fontsize=8,
                  color="white" if _luminance(bar.colour) < 0.6 else "#202020")  # fmt: skip
    return bool(fitting)


def _corners(bar: Bar) -> list[tuple[float, float]]:
    left, right, top, bottom = bar.start, bar.start + bar.length, bar.row - bar.height / 2, bar.row + bar.height / 2
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def legend(schedule: Schedule) -> list[tuple[str, str]]:
    """Colour and meaning of each op and chunk."""
    chunks = max(len(schedule.stages_of(rank)) for rank in range(schedule.pp))
    ops = [op for op in _COLOURS if any(action.op is op for row in schedule.actions for action in row)]
    return [
        (_shade(_COLOURS[op], chunk, chunks), _MEANINGS[op] + (f", chunk {chunk}" if chunks > 1 else ""))
        for op in ops
        for chunk in range(chunks)
    ]


def _title(schedule: Schedule) -> str:
    """Name and sizes."""
    virtual = schedule.num_stages // schedule.pp
    sizes = f"pp {schedule.pp}" + (f" x {virtual} chunks" if virtual > 1 else "")
    return f"{schedule.name}: {sizes}, {counted(schedule.num_microbatches, 'microbatch')}"


def _shade(colour: str, chunk: int, num_chunks: int) -> str:
    """The first chunk lightest, the last one darkest."""
    place = chunk / (num_chunks - 1) if num_chunks > 1 else 0.5
    mix, target = (0.45 - 0.9 * place, 255) if place <= 0.5 else (0.7 * place - 0.35, 0)
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (target - part) * mix):02x}" for part in parts)


def _luminance(colour: str) -> float:
    """Perceived brightness of a #rrggbb colour, 0 to 1."""
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue
