"""What tools/bench_comm.py measures of collectives: the cases, what each contestant is, the goals. Plain data.

A case is one op on tensors of one size. `num_bytes` is the whole tensor's: what all_reduce and broadcast move, what
all_gather has assembled, what reduce_scatter starts from.
"""

import statistics
from dataclasses import dataclass, field

KB, MB = 1024, 1024 * 1024
SMALL = 4 * KB
"""Latency rather than bandwidth: the promise to be never slower begins above it."""
OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")


@dataclass(frozen=True)
class Case:
    """One line of the table; a barrier has neither size nor dtype."""

    op: str
    size: int
    """Ranks."""
    num_bytes: int = 0
    dtype: str = "float32"

    @property
    def contestants(self) -> tuple[str, ...]:
        """shm and gloo as megalite uses them; `own` is gloo's own op where megalite has replaced it."""
        return ("shm", "gloo", "own") if self.op == "reduce_scatter" else ("shm", "gloo")


@dataclass(frozen=True)
class Plan:
    """How much is measured: `rounds` turns of all contestants, each of about `turn_s` seconds."""

    sizes: tuple[int, ...] = (2, 4)
    bytes: tuple[int, ...] = (64 * KB, 256 * KB, MB, 4 * MB, 16 * MB, 64 * MB)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    rounds: int = 9
    turn_s: float = 0.1
    max_calls: int = 200

    def cases(self, size: int) -> list[Case]:
        """The cases of one number of ranks: latencies first, then every op by size."""
        small = [Case("barrier", size), *(Case(op, size, SMALL) for op in OPS)]
        large = [Case(op, size, n, dtype) for op in OPS for dtype in self.dtypes for n in self.bytes]
        return small + large


FULL = Plan()
QUICK = Plan(bytes=(64 * KB, MB, 4 * MB, 16 * MB), rounds=5, turn_s=0.02, max_calls=100)
TINY = Plan(sizes=(2,), bytes=(64 * KB,), rounds=2, turn_s=0.001, max_calls=3)


@dataclass(frozen=True)
class Timing:
    """What a case took: contestant -> seconds per call of each round, the slowest rank's."""

    case: Case
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def median_s(self, contestant: str) -> float | None:
        """Seconds per call; None for who did not run."""
        own = self.seconds.get(contestant)
        return statistics.median(own) if own else None

    def ratio(self, other: str, contestant: str = "shm") -> float | None:
        """How many times faster the contestant is than the other: the median over rounds of a round's ratio."""
        ours, theirs = self.seconds.get(contestant), self.seconds.get(other)
        if not ours or not theirs:
            return None
        return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))


def goal(case: Case) -> tuple[str, float] | None:
    """(whom shm shall beat, how many times); None where nothing is promised."""
    if case.op == "barrier" or case.num_bytes <= SMALL:
        return None
    at_four = case.num_bytes == 4 * MB and case.size == 2
    if case.op == "all_reduce" and at_four:
        return "gloo", 3.0
    if case.op == "reduce_scatter" and at_four:
        return "own", 5.0
    return "gloo", 1.0


def holds(timing: Timing) -> bool | None:
    """Whether a case meets its goal; None without a goal or without a measurement."""
    wanted = goal(timing.case)
    if wanted is None or (ratio := timing.ratio(wanted[0])) is None:
        return None
    also = timing.ratio("gloo")  # where gloo's own op is the opponent, megalite's form of it stays one
    return ratio >= wanted[1] and also is not None and also >= 1.0


def merged(case: Case, of_ranks: list[dict[str, list[float]]]) -> Timing:
    """The ranks' seconds as one: a round takes as long as its slowest rank."""
    turns = {name: zip(*(rank[name] for rank in of_ranks), strict=True) for name in of_ranks[0]}
    return Timing(case, {name: [max(times) for times in own] for name, own in turns.items()})
