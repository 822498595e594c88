"""What tools/slow_link.py compares, and what its numbers mean. Plain data and arithmetic.

compute: the same step with nothing sent. comm: the same collectives one after the other with nothing computed. From
these and the step follows how much of either went under the other.
"""

import statistics
from dataclasses import dataclass, field, replace

from bench.measure import median_ratio
from bench.rows import ROWS, Contestant, Row

HIDDEN_GOAL, CHUNKED_GOAL, FSDP_GOAL = 0.6, 0.4, 1.5
_ROW = {row.name: row for row in ROWS}


def _megalite(label: str, variant: str = "overlap.backend=none") -> Contestant:
    return Contestant(label, "megalite_side", f"comm.cpu_backend=gloo {variant}")


NONE, CHUNKED = _megalite("megalite none"), _megalite("megalite chunked", "overlap.backend=chunked")
MEGALITE = _megalite("megalite")
FSDP = Contestant("torch fully_shard", "torch_side", "fsdp")
FSDP_ASYNC = Contestant("torch fully_shard, private async unshard", "torch_side", "fsdp_async")
DDP = Contestant("torch DDP", "torch_side", "ddp")
COMPUTE = Contestant("megalite, nothing sent", "silent_side", "comm.cpu_backend=gloo overlap.backend=none")
TORCH_COMPUTE = Contestant("torch, nothing sent", "torch_side", "")


@dataclass(frozen=True)
class LinkRow:
    """One layout. `hides`: the goal for (compute + comm - step) / min(compute, comm) of megalite, if there is one."""

    name: str
    title: str
    row: Row
    contestants: tuple[Contestant, ...]
    hides: float | None = None

    @property
    def computes(self) -> tuple[Contestant, ...]:
        """Who shows what a step takes with nothing sent, for each library."""
        torch = any(c.side == "torch_side" for c in self.contestants)
        return (COMPUTE, TORCH_COMPUTE) if torch else (COMPUTE,)

    def compute_of(self, contestant: Contestant) -> Contestant:
        """The one for a contestant: plain torch, or megalite with silent groups."""
        return TORCH_COMPUTE if contestant.side == "torch_side" else COMPUTE


ZERO0 = replace(_ROW["dp2-zero1"], name="dp2-zero0", zero=0)
LINK_ROWS = (
    LinkRow("tp", "tp 2 + sp", _ROW["tp2"], (NONE, CHUNKED)),
    LinkRow("zero3", "dp 2, ZeRO-3", _ROW["dp2-zero3"], (MEGALITE, FSDP, FSDP_ASYNC), hides=HIDDEN_GOAL),
    LinkRow("zero2", "dp 2, ZeRO-2", _ROW["dp2-zero2"], (MEGALITE, FSDP, FSDP_ASYNC)),
    LinkRow("zero0", "dp 2, ZeRO-0", ZERO0, (MEGALITE, DDP)),
)


@dataclass(frozen=True)
class Times:
    """What a contestant took on one link; seconds of each round, the slowest rank's.

    sent_bytes: per step, of the rank that sends most, headers included.
    """

    row: str
    label: str
    rate: str
    compute_s: list[float]
    comm_s: list[float]
    step_s: list[float]
    sent_bytes: float
    bytes_per_s: float
    num_calls: int = 0

    @property
    def compute(self) -> float:
        """Median seconds of computation alone."""
        return statistics.median(self.compute_s)

    @property
    def comm(self) -> float:
        """Median seconds of communication alone."""
        return statistics.median(self.comm_s)

    @property
    def step(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.step_s)

    @property
    def exposed(self) -> float:
        """Seconds that communication adds to a step."""
        return self.step - self.compute

    @property
    def hidden(self) -> float:
        """The part of what could go under the other that does; negative: slower than one after the other."""
        return (self.compute + self.comm - self.step) / min(self.compute, self.comm)

    @property
    def wire_s(self) -> float:
        """Seconds that the line needs for the bytes of a step."""
        return self.sent_bytes / self.bytes_per_s

    @property
    def over_floor(self) -> float:
        """How many times longer than the longer of computation and line."""
        return self.step / max(self.compute, self.wire_s)

    def ratio(self, other: "Times") -> float:
        """How many times faster than the other: the median over rounds of a round's ratio."""
        return median_ratio(other.step_s, self.step_s)


@dataclass(frozen=True)
class Verdict:
    """A goal, what was found, and the most that was possible where that is less than all."""

    text: str
    found: float
    goal: float
    possible: float | None = None

    @property
    def holds(self) -> bool:
        """Whether it was met."""
        return self.found >= self.goal


@dataclass
class LinkFound:
    """Everything that was measured."""

    times: list[Times] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def of(self, row: str, rate: str) -> dict[str, Times]:
        """Label -> times of one row on one link."""
        return {t.label: t for t in self.times if (t.row, t.rate) == (row, rate)}


def verdicts(row: LinkRow, own: dict[str, Times]) -> list[Verdict]:
    """The goals of a row on one link."""
    found = []
    if NONE.label in own and CHUNKED.label in own:
        none, chunked = own[NONE.label], own[CHUNKED.label]
        text = "chunked hides of the tp communication that none exposes"
        possible = min(none.exposed, none.compute) / none.exposed
        found.append(Verdict(text, 1 - chunked.exposed / none.exposed, CHUNKED_GOAL, possible))
    if row.hides is not None and MEGALITE.label in own:
        found.append(Verdict("gathers and reduces under compute", own[MEGALITE.label].hidden, row.hides))
        if FSDP.label in own:
            faster = own[MEGALITE.label].ratio(own[FSDP.label])
            found.append(Verdict("times faster than torch's fully_shard", faster, FSDP_GOAL))
    return found


def selected(names: list[str] | None) -> list[LinkRow]:
    """The rows of these names in the table's order; tp and zero3, which have goals, without names."""
    return [row for row in LINK_ROWS if row.name in (names or ("tp", "zero3"))]
