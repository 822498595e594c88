"""Measures rows of bench/link_rows.py behind one slow link; contestants take turns, round by round.

Invariant: ranks are stopped unless it is their turn, so the link and the cores are one contestant's at a time.
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from bench import network
from bench.job import BLOCK_LIMIT_S, START_LIMIT_S, Host, JobError, Ranks
from bench.link import DEVICE, Speed, slow_link
from bench.link_rows import LinkFound, LinkRow, Times
from bench.measure import Effort
from bench.rows import Contestant, Work

WARM_STEPS = 2
"""What link_rank has trained when it is ready."""
WEIGHTS = "weights.pt"
Say = Callable[[str], None]


class LinkJob:
    """One contestant's ranks, one on either side of the link. Use as a context."""

    def __init__(self, contestant: Contestant, row: LinkRow, work: Work, *, hosts: list[Host], folder: Path):
        self.contestant, self.hosts = contestant, hosts
        weights = str(folder.parent / WEIGHTS)
        self.calls = [("link_rank.serve", contestant, row.row, work, weights)] * len(hosts)
        self.log = folder / f"{row.name}-{contestant.label.replace(' ', '_').replace(',', '')}.log"
        self.next_step = WARM_STEPS
        self.step_s: list[float] = []
        self.comm_s: list[float] = []
        self.sent_bytes = 0.0

    def __enter__(self) -> "LinkJob":
        self.ranks = Ranks(self.calls, self.log, hosts=self.hosts)
        self.num_calls = self.ranks.answers(START_LIMIT_S)[0]
        return self

    def __exit__(self, kind, *_) -> None:
        self.ranks.end(polite=kind is None)

    def steps(self, number: int) -> None:
        """Train; the bytes are those of the rank that sends most."""
        before = self._sent()
        done = self.ranks.ask(("step", self.next_step, number), BLOCK_LIMIT_S)
        self.next_step += number
        self.sent_bytes = max(b - a for a, b in zip(before, self._sent(), strict=True)) / number
        self.step_s += [max(times) for times in zip(*(rank.wall_s for rank in done), strict=True)]

    def comm(self, number: int) -> None:
        """The collectives alone."""
        done = self.ranks.ask(("comm", number), BLOCK_LIMIT_S)
        self.comm_s += [max(times) for times in zip(*done, strict=True)]

    def _sent(self) -> list[int]:
        return [network.sent_bytes(process.pid, DEVICE) for process in self.ranks.processes]


def measure_row(
    row: LinkRow, work: Work, *, speed: Speed, hosts: list[Host], effort: Effort, folder: Path
) -> list[Times]:
    """One row on one link. Logs go into `folder`, the initial weights are in the one above.

    Raises:
        JobError: a contestant failed.
    """
    with ExitStack() as stack:
        jobs = {}
        for contestant in (*row.contestants, *row.computes):
            job = LinkJob(contestant, row, work, hosts=hosts, folder=folder)
            jobs[contestant.label] = _named(job, lambda job=job: stack.enter_context(job))
        for number in range(effort.rounds):
            turns = list(jobs.values())
            for job in turns if number % 2 == 0 else reversed(turns):
                _named(job, lambda job=job: job.steps(effort.steps))
                if job.contestant in row.contestants:
                    _named(job, lambda job=job: job.comm(effort.steps))
    return [
        Times(
            row=row.name,
            label=c.label,
            rate=speed.text(),
            compute_s=jobs[row.compute_of(c).label].step_s,
            comm_s=jobs[c.label].comm_s,
            step_s=jobs[c.label].step_s,
            sent_bytes=jobs[c.label].sent_bytes,
            bytes_per_s=speed.bytes_per_s,
            num_calls=jobs[c.label].num_calls,
        )
        for c in row.contestants
    ]


def measure_link(
    rows: list[LinkRow], work: Work, found: LinkFound, *, speed: Speed, effort: Effort, folder: Path, say: Say
) -> None:
    """All rows on one link; one that fails is noted, and the others go on. The initial weights are in `folder`.

    Raises:
        OSError: the link can't be made.
    """
    logs = folder / speed.text().replace(" ", "_")
    logs.mkdir()
    with slow_link(speed) as hosts:
        for row in rows:
            say(f"{speed.text()}: {row.title}: {', '.join(c.label for c in row.contestants)}")
            try:
                found.times += measure_row(row, work, speed=speed, hosts=hosts, effort=effort, folder=logs)
            except JobError as error:
                found.failed.append(f"{speed.text()}: {row.title}: {error}")


def _named(job: LinkJob, run: Callable):
    """Say in an error whose it is."""
    try:
        return run()
    except JobError as error:
        raise JobError(f"{job.contestant.label}: {error}") from None
