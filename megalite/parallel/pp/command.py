"""The `schedule` command: what a pipeline schedule looks like, what it idles and what it holds."""

from dataclasses import dataclass
from pathlib import Path

from megalite.config.pipeline import SCHEDULES
from megalite.observe.outputs import check_output_file
from megalite.parallel.pp.check import Report, check
from megalite.parallel.pp.draw import text_grid, write_picture
from megalite.parallel.pp.lower import lower
from megalite.parallel.pp.schedule import Schedule, counted
from megalite.parallel.pp.schedules import build_schedule
from megalite.parallel.pp.simulate import Timeline, simulate
from megalite.parallel.pp.trace import timeline_spans, trace_events, write_trace

OPTIONS = {
    "pipeline.schedule": "--kind",
    "mesh.pp": "--pp",
    "pipeline.virtual": "--virtual",
    "batch.num_microbatches": "--microbatches",
}
"""Fields of a config and what they are here."""


@dataclass(frozen=True)
class Outputs:
    """Files to write; None: not; an empty name: `default_name`'s."""

    png: str | None = None
    svg: str | None = None
    trace: str | None = None


def schedule_command(
    kind: str, *, pp: int, virtual: int | None, num_microbatches: int, costs: str = "1,1,1,0", outputs: Outputs
) -> str:
    """The text grid of a schedule and its summary; `outputs` are written. The schedule is lowered and proved first.

    Args:
        virtual: None: the fewest chunks that the kind is made for.
        costs:   lengths of a stage's forward, input gradient, weight gradient and message: whole numbers. A backward
                 that is not split takes as long as its two halves. Messages travel beside computation. zb_h2 is made
                 for them.

    Raises:
        ValueError: sizes that the schedule can't take, or costs that are not four whole numbers.
        OSError: a file can't be written.
    """
    lengths_of = _costs(costs)
    try:
        schedule = build_schedule(
            kind, pp=pp, virtual=virtual or _virtual(kind), num_microbatches=num_microbatches, costs=lengths_of
        )
    except ValueError as error:
        raise ValueError(_in_options(str(error))) from None
    outputs = _named(outputs, kind, schedule)
    for option, path in vars(outputs).items():
        if path is not None:
            check_output_file(f"--{option}", path)
    report = check(lower(schedule, zero_stage=0, reshard_after="step", reduce_each="step"))
    forward, input_grad, weight_grad, send = lengths_of
    lengths = {"forward_s": forward, "backward_s": input_grad + weight_grad}
    lengths |= {"input_s": input_grad, "weight_s": weight_grad}
    timeline, free = (simulate(schedule, **lengths, send_s=length) for length in (send, 0))
    for path, write in ((outputs.png, "png"), (outputs.svg, "svg")):
        if path is not None:
            write_picture(schedule, timeline, path, form=write, shares=_shares(timeline, free))
    if outputs.trace is not None:
        write_trace(trace_events(timeline_spans(timeline), process=f"{schedule.name}, simulated"), outputs.trace)
    stages = f"{counted(schedule.num_stages, 'stage')} on {counted(pp, 'rank')}"
    lines = [
        f"{schedule.name}: {stages}, {counted(num_microbatches, 'microbatch')}",
        text_grid(timeline),
        *_summary(schedule, report, timeline, free),
        *(f"{name}: {path}" for name, path in vars(outputs).items() if path is not None),
    ]
    return "\n".join(lines) + "\n"


def _in_options(text: str) -> str:
    """A message about a config's fields as one about this command's options."""
    for field, option in OPTIONS.items():
        text = text.replace(f"{field}=", f"{option}=")
    return text


def default_name(kind: str, schedule: Schedule, suffix: str) -> str:
    """schedule_zbv_pp4_m8.png; chunks are named where a kind takes any number, of a file the stem is taken."""
    virtual = schedule.num_stages // schedule.pp
    chunks = f"_v{virtual}" if virtual != _virtual(kind) else ""
    return f"schedule_{Path(kind).stem}_pp{schedule.pp}{chunks}_m{schedule.num_microbatches}.{suffix}"


def _named(outputs: Outputs, kind: str, schedule: Schedule) -> Outputs:
    """The outputs with default names filled in."""
    suffixes = {"png": "png", "svg": "svg", "trace": "json"}
    names = {which: default_name(kind, schedule, suffix) for which, suffix in suffixes.items()}
    return Outputs(**{which: names[which] if given == "" else given for which, given in vars(outputs).items()})


def _virtual(kind: str) -> int:
    """Chunks per rank where none are given."""
    if kind == "interleaved":
        return 2
    return (SCHEDULES[kind].virtual or 1) if kind in SCHEDULES else 1


def _costs(text: str) -> tuple[int, int, int, int]:
    words = [word.strip() for word in text.split(",")]
    if len(words) != 4 or not all(word.isascii() and word.isdigit() for word in words) or "0" in words[:3]:
        raise ValueError(
            f"--costs={text} must be four whole numbers, of a forward, an input gradient, a weight gradient (each at "
            "least 1) and a message; e.g. 2,2,1,0"
        )
    forward, input_grad, weight_grad, send = map(int, words)
    return forward, input_grad, weight_grad, send


def _shares(timeline: Timeline, free: Timeline) -> str:
    """Where the time of all ranks goes; `free` is the timeline with free messages. The printed shares add up to 100%.

    Exposed communication is what the step takes longer than `free`, bubble the rest of what ranks idle.
    """
    exposed = round(100 * float((timeline.makespan_s - free.makespan_s) / timeline.makespan_s), 1)
    compute = round(100 * float(1 - timeline.total_bubble), 1)
    bubble = abs(round(100 - compute - exposed, 1))  # not -0.0
    return f"compute {compute:.1f}%, bubble {bubble:.1f}%, exposed communication {exposed:.1f}%"


def _summary(schedule: Schedule, report: Report, timeline: Timeline, free: Timeline) -> list[str]:
    """Shares of the step's time over all ranks, and numbers per rank; `free` is the timeline with free messages."""
    busy = max(timeline.busy_s(rank) for rank in range(schedule.pp))
    own = 100 * (timeline.longest_rank_s - busy) / timeline.longest_rank_s
    per_rank = {
        "idle": [f"{100 * timeline.bubble(rank):.1f}%" for rank in range(schedule.pp)],
        "peak live activations": list(map(str, report.peak_live)),
        "messages": list(map(str, report.num_messages)),
    }
    return [
        f"step: {timeline.makespan_s} units of time: {_shares(timeline, free)}",
        f"idle: bubble and exposed communication, {100 - round(100 * float(1 - timeline.total_bubble), 1):.1f}% of the "
        f"step or {100 * timeline.overhead:.1f}% of the computation; {own:.1f}% between a rank's first and last action",
        *(f"{name + ' per rank:':32}{'  '.join(values)}" for name, values in per_rank.items()),
    ]
