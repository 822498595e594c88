"""Traces of steps that really ran: `run.trace: true` writes, per traced step, a Chrome/Perfetto file and a picture.

[Note: one clock] Before the first traced step all ranks go through a few barriers. A rank can't leave one before every
rank has come to it, so each gives a lower and an upper bound of the difference between its clock and rank 0's, and
their intersection a true interval. A difference of zero inside of it is taken as it is (ranks of one host read the
same clock), else the middle; half the interval's width, or all of it for zero, bounds the error and is written down.
Before every traced step the ranks wait for each other, so that nothing of what one of them did before (writing the
last trace, the log, a checkpoint) counts as another one's bubble or communication.
Memory: at most MAX_SPANS spans a rank and MAX_SPANS_ALL in all, gathered on rank 0 after each traced step and written.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megalite.comm.collectives import all_gather, all_reduce
from megalite.mesh import Group, Mesh
from megalite.observe.log import get_logger
from megalite.observe.spans import Span, Spans
from megalite.parallel.pp.draw_measured import write_measured_picture
from megalite.parallel.pp.measured import Shares, Step, shifted, trace_spans
from megalite.parallel.pp.trace import joined, trace_events, write_trace
from megalite.train.build import Trainer

MAX_SPANS, MAX_SPANS_ALL = 100_000, 2_000_000
DEFAULT_STEPS = (3, 4)
"""Of those that this start runs: first calls and their compiles are over."""
CLOCK_ROUNDS = 16


@dataclass(frozen=True)
class Traced:
    """What rank 0 keeps of a traced step. `shares` is None when spans were dropped."""

    step: int
    shares: Shares | None
    path: Path


class StepTracer:
    """Records the steps first .. last of a run and writes them; collective, on every rank alike.

    Args:
        tell: is told of each traced step, on rank 0.
    """

    def __init__(self, trainer: Trainer, *, first: int, last: int, tell: Callable[[Traced], None] | None = None):
        self.trainer = trainer
        self.first, self.last = first, last
        self.tell = tell
        self.limit = min(MAX_SPANS, MAX_SPANS_ALL // trainer.mesh.sizes.world)
        self.clock: tuple[float, float] | None = None
        """Of this rank against rank 0: difference and error bound."""

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around one step; does nothing for those that are not traced.

        Communication: before the first traced step CLOCK_ROUNDS all-reduces of 8 bytes and an all-gather of their
        times, before each one an all-reduce of 8 bytes that no ledger keeps, after each one the spans to rank 0.
        """
        if not self.first <= step <= self.last:
            yield
            return
        mesh = self.trainer.mesh
        if self.clock is None:
            self.clock = clock_difference(mesh)
        wait_for_all(mesh, site="trace.begin")
        spans = Spans(mesh.device, limit=self.limit)
        mesh.ledger.spans = spans
        try:
            with spans.span(f"step {step}", "step"):
                yield
        finally:
            mesh.ledger.spans = None
        self._write(step, spans)

    def _write(self, step: int, spans: Spans) -> None:
        difference, error_s = self.clock
        mine = (shifted(spans.take(), spans.origin_s - difference), spans.num_dropped, error_s)
        ranks = gather(self.trainer.mesh.world, mine)
        if ranks is None:
            return
        begin = min(own[0].start_s for own, _, _ in ranks)
        whole = Step([shifted(own, -begin) for own, _, _ in ranks], self.trainer.mesh.sizes.groups(("pp",)))
        num_dropped = sum(number for _, number, _ in ranks)
        if num_dropped:
            get_logger().warning("trace of step %d: %d spans beyond the limit of %d a rank were dropped, so it has no "
                                 "shares", step, num_dropped, self.limit)  # fmt: skip
        shares = None if num_dropped else whole.shares()
        folder = Path(self.trainer.config.run.dir) / "trace"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"step_{step:08d}.json"
        about = {"step": step, "clock_error_s": max(error for _, _, error in ranks), "dropped_spans": num_dropped}
        about |= {} if shares is None else vars(shares)
        self._write_files(path, whole, about, shares)
        if self.tell:
            self.tell(Traced(step, shares, path))

    def _write_files(self, path: Path, step: Step, about: dict, shares: Shares | None) -> None:
        """The measured timeline over the one that the schedule would have with the same computations."""
        lowered = self.trainer.runtime.lowered
        names = rank_names(self.trainer.mesh)
        traces = [trace_events(trace_spans(step.spans), names=names)]
        plan = step.planned(lowered) if shares else None
        if plan:
            about = about | {"simulated": vars(plan.shares())}
            own = {rank: f"pp {rank}" for rank in range(lowered.schedule.pp)}
            simulated = trace_events(
                trace_spans(plan.spans()), process="simulated with the measured lengths", pid=1, names=own
            )
            traces.append(simulated)
        write_trace(joined(*traces, **about), path)
        title = f"step {about['step']} ({lowered.schedule.name}), measured" + (f": {shares.text()}" if shares else "")
        write_measured_picture(
            lowered.schedule, step, plan, path.with_suffix(".png"), title=title, names=list(names.values())
        )


def make_tracer(trainer: Trainer, *, start: int, tell: Callable[[Traced], None] | None = None) -> StepTracer:
    """The tracer that run.trace and run.trace_steps ask for, of a run that starts after step `start`."""
    run = trainer.config.run
    if not run.trace:
        return StepTracer(trainer, first=0, last=0)
    first, last = run.trace_steps or (min(start + step, run.steps) for step in DEFAULT_STEPS)
    if last <= start:
        get_logger().warning("run.trace_steps=[%d, %d] are over: the run starts after step %d", first, last, start)
    return StepTracer(trainer, first=first, last=last, tell=tell)


def wait_for_all(mesh: Mesh, *, site: str) -> None:
    """Return when all ranks have come, at most run.timeout_s later."""
    token = torch.zeros(1, dtype=torch.float64, device=mesh.device)
    all_reduce(token, mesh.world, site=site)
    token.item()


def clock_difference(mesh: Mesh) -> tuple[float, float]:
    """This rank's clock minus rank 0's, and a bound of the error; see [Note: one clock]."""
    world, device = mesh.world, mesh.device
    if world.size == 1:
        return 0.0, 0.0
    times = torch.zeros(2, CLOCK_ROUNDS, dtype=torch.float64)
    for number in range(CLOCK_ROUNDS):
        came = time.perf_counter()
        wait_for_all(mesh, site="trace.clock")
        times[:, number] = torch.tensor([came, time.perf_counter()], dtype=torch.float64)
    every = torch.empty(world.size, *times.shape, dtype=torch.float64, device=device)
    all_gather(every, times[None].to(device), world, site="trace.clock")
    return bounded_difference(every[world.rank].tolist(), every[0].tolist())


def bounded_difference(own: list[list[float]], first: list[list[float]]) -> tuple[float, float]:
    """The difference of two clocks and its error bound, from the times at which each came to barriers and left them."""
    lower = max(came - left for came, left in zip(own[0], first[1], strict=True))
    upper = min(left - came for left, came in zip(own[1], first[0], strict=True))
    if lower <= 0.0 <= upper:
        return 0.0, max(upper, -lower)
    return (lower + upper) / 2, (upper - lower) / 2


def gather(world: Group, mine: tuple[list[Span], int, float]) -> list[tuple[list[Span], int, float]] | None:
    """What all ranks have, on rank 0; None on the others."""
    if world.size == 1:
        return [mine]
    found = [None] * world.size if world.rank == 0 else None
    dist.gather_object(mine, found, dst=world.ranks[0], group=world.pg)
    return found


def rank_names(mesh: Mesh) -> dict[int, str]:
    """rank 5: pp 1, dp 0, tp 1; axes of size 1 are left out."""
    sizes, names = mesh.sizes, {}
    for rank in range(sizes.world):
        at = sizes.coordinates(rank)
        own = {"pp": at["pp"], "dp": at["dp_replicate"] * sizes.dp_shard + at["dp_shard"], "tp": at["tp"]}
        where = ", ".join(f"{axis} {index}" for axis, index in own.items() if getattr(sizes, axis) > 1)
        names[rank] = f"rank {rank}" + (f": {where}" if where else "")
    return names
