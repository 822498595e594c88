"""Measures rows: the contestants of a row take turns, block by block, so that a busy machine hits all of them alike.

Invariant: every contestant trains steps 0, 1, 2 ... from the same weights, so losses of the same step can be compared;
the reference is plain torch in one process. Warm-up steps count for losses only.
"""

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from bench import network
from bench.job import Block, Job, JobError, prepare_weights
from bench.rows import Contestant, Row, Work


@dataclass(frozen=True)
class Effort:
    """How much is measured: `rounds` blocks of `steps` steps after `warmup` steps."""

    rounds: int
    steps: int
    warmup: int


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    row: str
    label: str
    ours: bool
    tokens_per_s: float
    cpu_s: float
    wire_bytes: float | None
    peak_rss_bytes: tuple[int, int]
    """Smallest and largest over the ranks."""
    losses: list[float]
    block_s: list[float]
    """Seconds per step, a median for each round."""
    block_cpu_s: list[float]
    """CPU seconds per step, likewise."""
    loss_difference: float = 0.0
    traffic: dict[str, float] | None = None
    """Payload bytes per step over all ranks by `axis op`, by the contestant's own account."""

    @property
    def ledger_bytes(self) -> float | None:
        """All payload per step, by whatever way, by the contestant's own account."""
        return None if self.traffic is None else sum(self.traffic.values())

    @property
    def on_wire(self) -> bool:
        """Whether the network's count is all that was sent; False: collectives went through shared memory."""
        return self.wire_bytes is not None and self.wire_bytes >= 0.95 * (self.ledger_bytes or 0.0)

    def text(self) -> str:
        """One line for whoever waits."""
        wire = "?" if self.wire_bytes is None else f"{self.wire_bytes / 1e6:.1f}"
        return (
            f"{self.label}: {self.tokens_per_s:.0f} tokens/s, {self.cpu_s:.3g} CPU s, {wire} MB sent, at most "
            f"{self.peak_rss_bytes[1] / 1e6:.0f} MB a rank, loss differs by {self.loss_difference:.1e}"
        )


@dataclass
class Measured:
    """Everything that was found."""

    results: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def measure(rows: list[Row], work: Work, *, effort: Effort, folder: Path, say: Callable[[str], None]) -> Measured:
    """Measure rows one after the other; one that fails is noted, and the others go on.

    Args:
        folder: for the initial weights and the ranks' logs.
        say: is told of every row.
    """
    counted = network.available()
    weights = folder / "weights.pt"
    prepare_weights(work, weights)
    found = Measured()
    if not counted:
        found.notes.append(
            "wire bytes: no network namespace here (needs root on Linux), so megalite's are its ledger's (payload "
            "only) and the others' are not measured"
        )
    reference: list[float] | None = None
    for row in rows:
        say(f"{row.name}: {', '.join(c.label for c in row.contestants)}")
        jobs = [
            Job(contestant, row, work, weights=str(weights), logs=folder, counted=counted)
            for contestant in row.contestants
            if _present(contestant, found)
        ]
        try:
            results = measure_row(row, jobs, work, effort)
        except JobError as error:
            found.failed.append(f"{row.name}: {error}")
            continue
        if row.world_size == 1:
            reference = next(result.losses for result in results if not result.ours)
        for result in results:
            # nan where the reference has failed: its row says so
            result_difference = difference(result.losses, reference) if reference else float("nan")
            found.results.append(_with_difference(result, result_difference))
            say(f"  {found.results[-1].text()}")
    return found


def measure_row(row: Row, jobs: list[Job], work: Work, effort: Effort) -> list[Result]:
    """All contestants of a row, alternated; every second round in reverse order.

    Raises:
        JobError: a contestant failed.
    """
    blocks: list[list[Block]] = [[] for _ in jobs]
    with ExitStack() as stack:
        for job in jobs:
            _named(job, lambda job=job: stack.enter_context(job))
        warm = [_named(job, lambda job=job: job.run(0, effort.warmup)) for job in jobs]
        for number in range(effort.rounds):
            first = effort.warmup + number * effort.steps
            order = range(len(jobs)) if number % 2 == 0 else reversed(range(len(jobs)))
            for index in order:
                job = jobs[index]
                blocks[index].append(_named(job, lambda job=job, first=first: job.run(first, effort.steps)))
    return [
        summed_up(row, job.contestant, work, blocks=own, warm=before)
        for job, before, own in zip(jobs, warm, blocks, strict=True)
    ]


def summed_up(row: Row, contestant: Contestant, work: Work, *, blocks: list[Block], warm: Block) -> Result:
    """Medians over all measured steps."""
    wire = [block.wire_bytes for block in blocks]
    peaks = blocks[-1].peak_rss_bytes
    return Result(
        row=row.name,
        label=contestant.label,
        ours=contestant.ours,
        tokens_per_s=work.tokens_per_step / statistics.median(s for block in blocks for s in block.wall_s),
        cpu_s=statistics.median(s for block in blocks for s in block.cpu_s),
        wire_bytes=None if None in wire else statistics.median(wire),
        peak_rss_bytes=(min(peaks), max(peaks)),
        losses=[loss for block in (warm, *blocks) for loss in block.losses],
        block_s=[statistics.median(block.wall_s) for block in blocks],
        block_cpu_s=[statistics.median(block.cpu_s) for block in blocks],
        traffic=blocks[-1].traffic,
    )


def difference(losses: list[float], reference: list[float]) -> float:
    """Largest difference of the losses of the same steps."""
    return max(abs(a - b) for a, b in zip(losses, reference, strict=True))


def median_ratio(over: list[float], under: list[float]) -> float:
    """The median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def _with_difference(result: Result, value: float) -> Result:
    return Result(**(vars(result) | {"loss_difference": value}))


def _named(job: Job, run: Callable):
    """Say in an error whose it is."""
    try:
        return run()
    except JobError as error:
        raise JobError(f"{job.contestant.label}: {error}") from None


def _present(contestant: Contestant, found: Measured) -> bool:
    """Leave DeepSpeed out where it is not installed."""
    if contestant.side != "deepspeed_side" or find_spec("deepspeed") is not None:
        return True
    note = "DeepSpeed is not installed and was left out"
    found.notes += [note] if note not in found.notes else []
    return False
