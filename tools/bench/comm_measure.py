"""Runs the sections of tools/bench_comm.py: collectives case by case, and whole tp steps on either transport."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench import network
from bench.comm_cases import Plan, Timing, merged
from bench.job import START_LIMIT_S, Job, JobError, Ranks, prepare_weights
from bench.measure import Effort, Result, measure_row
from bench.rows import Contestant, Row, Work

CASE_LIMIT_S = 120.0
GLOO = Contestant("megalite, gloo", "megalite_side", "comm.cpu_backend=gloo")
SHM = Contestant("megalite, shm", "megalite_side", "comm.cpu_backend=shm")
DTENSOR = Contestant("torch DTensor tp + sp", "torch_side")
STEP = Row("tp2", "tp 2 + sp", (), tp=2)
GOALS = {GLOO.label: 1.2, SHM.label: 1.4}
"""Tokens/s of DTensor's, at least."""


@dataclass
class Found:
    """Everything that was measured. missing: why there is no shm here, by number of ranks."""

    timings: list[Timing] = field(default_factory=list)
    steps: list[Result] = field(default_factory=list)
    missing: dict[int, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def measure_collectives(plan: Plan, found: Found, *, folder: Path, say: Callable[[str], None]) -> None:
    """Time every case; a number of ranks that fails is noted, and the others go on."""
    for size in plan.sizes:
        say(f"collectives on {size} ranks")
        try:
            with Ranks([("comm_rank.serve", plan)] * size, folder / f"collectives-{size}.log") as ranks:
                if missing := ranks.answers(START_LIMIT_S)[0]:
                    found.missing[size] = missing
                for case in plan.cases(size):
                    found.timings.append(merged(case, ranks.ask(case, CASE_LIMIT_S)))
        except JobError as error:
            found.failed.append(f"collectives on {size} ranks: {error}")


def measure_steps(work: Work, found: Found, *, effort: Effort, folder: Path, say: Callable[[str], None]) -> None:
    """Train with tp 2 + sp on gloo, on shm and with torch's DTensor, in turns."""
    counted = network.available()
    if not counted:
        found.notes.append("wire bytes are not measured: no network namespace here (needs root on Linux)")
    contestants = [GLOO, *([] if found.missing else [SHM]), DTENSOR]
    say(f"training step: {', '.join(c.label for c in contestants)}")
    try:
        prepare_weights(work, folder / "weights.pt")
        jobs = [
            Job(c, STEP, work, weights=str(folder / "weights.pt"), logs=folder, counted=counted) for c in contestants
        ]
        found.steps += measure_row(STEP, jobs, work, effort)
    except JobError as error:
        found.failed.append(f"training step: {error}")
