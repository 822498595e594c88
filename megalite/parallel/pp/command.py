"""The `schedule` command: what a pipeline schedule looks like, what it idles and what it holds."""

from megalite.parallel.pp.check import check
from megalite.parallel.pp.draw import counted, text_grid, write_png
from megalite.parallel.pp.lower import lower
from megalite.parallel.pp.schedules import build_schedule
from megalite.parallel.pp.simulate import simulate


def schedule_command(kind: str, *, pp: int, virtual: int, num_microbatches: int, png: str | None) -> str:
    """The text grid of a schedule and its summary; with `png`, also a picture written there.

    A forward takes one unit of time and a backward two, on every stage; messages take none. The schedule is lowered and
    proved before it is drawn.

    Raises:
        ValueError: sizes that the schedule can't take.
        OSError: `png` can't be written.
    """
    schedule = build_schedule(kind, pp=pp, virtual=virtual, num_microbatches=num_microbatches)
    report = check(lower(schedule, zero_stage=0, reshard_after="step", reduce_each="step"))
    timeline = simulate(schedule, forward_s=1, backward_s=2, send_s=0)
    if png is not None:
        write_png(schedule, timeline, png)
    stages = f"{counted(schedule.num_stages, 'stage')} on {counted(pp, 'rank')}"
    per_rank = [("idle", [f"{100 * timeline.bubble(rank):.1f}%" for rank in range(pp)])]
    per_rank.append(("peak live activations", list(map(str, report.peak_live))))
    per_rank.append(("messages", list(map(str, report.num_messages))))
    lines = [
        f"{schedule.name}: {stages}, {counted(num_microbatches, 'microbatch')}",
        text_grid(timeline),
        f"bubble: {100 * timeline.total_bubble:.1f}% of the step is idle ({100 * timeline.overhead:.1f}% of the work)",
        *(f"{name + ' per rank:':32}{'  '.join(values)}" for name, values in per_rank),
        *([f"picture: {png}"] if png is not None else []),
    ]
    return "\n".join(lines) + "\n"
