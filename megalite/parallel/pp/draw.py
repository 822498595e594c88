"""Pictures of a schedule: a text grid and a PNG or SVG, all from the same timeline.

The text grid has one row per pp rank and one column per unit of time; an action stands where it starts, `=` fills the
rest of its time, `.` is idle time. The picture has a bar per action, coloured by op, darker for later chunks of a rank.
"""

from math import ceil
from pathlib import Path
from typing import Literal

from megalite.parallel.pp.actions import Op
from megalite.parallel.pp.schedule import Schedule
from megalite.parallel.pp.simulate import Span, Timeline

_STYLES = {Op.F: "cyan", Op.B: "green", Op.I: "yellow", Op.W: "magenta"}
_COLOURS = {Op.F: "#4c8fd6", Op.B: "#5aab61", Op.I: "#e0a33c", Op.W: "#a873c4"}
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


def write_picture(schedule: Schedule, timeline: Timeline, path: str | Path, *, form: Literal["png", "svg"]) -> None:
    """Draw the timeline; needs matplotlib. Microbatch numbers are left out where they would not fit."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    length = float(timeline.makespan_s)
    inches = min(40.0, max(8.0, 0.22 * length + 1.5))
    figure = Figure(figsize=(inches, 0.5 * schedule.pp + 1.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for rank, row in enumerate(timeline.spans):
        stages = schedule.stages_of(rank)
        for span in row:
            colour = _shade(_COLOURS[span.action.op], stages.index(span.action.stage), len(stages))
            _draw_bar(axes, rank, span, colour, points_per_unit=72 * (inches - 1.2) / length)
    axes.set_title(_title(schedule, timeline), fontsize=11, loc="left")
    axes.set_xlim(0, length)
    axes.set_ylim(schedule.pp - 0.5, -0.5)
    axes.set_yticks(range(schedule.pp), [f"rank {rank}" for rank in range(schedule.pp)])
    axes.set_xlabel("time (forwards of one stage)", fontsize=9)
    axes.set_facecolor("#f0f0f0")
    axes.tick_params(length=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for side in axes.spines.values():
        side.set_visible(False)
    patches = [Patch(**entry) for entry in _legend(schedule)]
    figure.legend(handles=patches, loc="outside lower left", ncols=5 if inches < 14 else 9, fontsize=8, frameon=False)
    figure.savefig(path, format=form)


def _draw_bar(axes, rank: int, span: Span, colour: str, *, points_per_unit: float) -> None:
    """One action as a bar with its microbatch number."""
    start, length = float(span.start_s), float(span.end_s - span.start_s)
    axes.barh(rank, length, left=start, height=0.86, color=colour, edgecolor="white", linewidth=0.8)
    text = str(span.action.mb)
    if length * points_per_unit > 6 * len(text) + 1:
        dark = _luminance(colour) < 0.6
        axes.text(start + length / 2, rank, text, ha="center", va="center", fontsize=8,
                  color="white" if dark else "#202020")  # fmt: skip


def _legend(schedule: Schedule) -> list[dict[str, str]]:
    """One entry per op and chunk."""
    chunks = max(len(schedule.stages_of(rank)) for rank in range(schedule.pp))
    ops = [op for op in _COLOURS if any(action.op is op for row in schedule.actions for action in row)]
    entries = []
    for op in ops:
        for chunk in range(chunks):
            label = _MEANINGS[op] + (f", chunk {chunk}" if chunks > 1 else "")
            entries.append({"facecolor": _shade(_COLOURS[op], chunk, chunks), "label": label})
    return [*entries, {"facecolor": "#f0f0f0", "label": "idle"}]


def _title(schedule: Schedule, timeline: Timeline) -> str:
    """Name, sizes and bubble."""
    virtual = schedule.num_stages // schedule.pp
    sizes = f"pp {schedule.pp}" + (f" x {virtual} chunks" if virtual > 1 else "")
    bubble = 100 * float(timeline.total_bubble)
    return f"{schedule.name}: {sizes}, {counted(schedule.num_microbatches, 'microbatch')}, bubble {bubble:.1f}%"


def counted(count: int, noun: str) -> str:
    """`1 microbatch`, `2 microbatches`."""
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{ending}"


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
