"""What tools/bench_train.py is to show, and whether it does. The numbers hold for the default work only.

A goal that is missed is said, and changes no exit code: it may be the machine.
"""

from dataclasses import dataclass

from bench.measure import Measured, median_ratio
from bench.rows import MEGALITE, ONE_PROCESS, Work

GOALS_HEADER = ("row", "goal", "found", "")
FLOOR_BYTES = {"dp2-zero1": 71.5e6, "dp2-zero2": 71.5e6, "dp2-zero3": 107e6, "tp2": 285e6}
"""What the best algorithm must send, over all ranks."""
HEADERS = 1.01
"""Of TCP and gloo, on top of a floor."""
CUBE, CUBE_CPU, CUBE_SPEED = "2x2x2", 3.8 / 3.0, 1.7
"""CPU seconds of 8 ranks over one process of torch that takes turns with them; speed over torch."""


@dataclass(frozen=True)
class Verdict:
    """One goal and what was found."""

    row: str
    goal: str
    found: str
    holds: bool

    def line(self) -> tuple[str, ...]:
        """For the table."""
        return self.row, self.goal, self.found, "holds" if self.holds else "MISSED"


def verdicts(ratios: list[dict], found: Measured, work: Work) -> list[Verdict]:
    """All goals of the rows that were measured.

    Args:
        ratios: of tables.ratios.
    """
    if work != Work():
        return []
    judged = []
    for row in ratios:
        name, speed, rss = row["row"], row["tokens_per_s"]["ratio"], row["rss"]["ratio"]
        least = CUBE_SPEED if name == CUBE else 1.0
        goal = f"tokens/s at least {least:g}x the best opponent's"
        judged.append(Verdict(name, goal, f"{speed:.2f}x", speed >= least))
        judged.append(Verdict(name, "peak RSS at most the best opponent's", f"1/{rss:.2f} of it", rss >= 1.0))
        judged += _wire(name, found)
        if name == CUBE:
            judged += _cpu(found)
    return judged


def _wire(name: str, found: Measured) -> list[Verdict]:
    ours = [r for r in found.results if r.row == name and r.ours and r.on_wire and r.wire_bytes]
    if name not in FLOOR_BYTES or not ours:
        return []
    floor, sent = FLOOR_BYTES[name], ours[-1].wire_bytes
    goal = f"wire bytes at the floor, {floor / 1e6:g} MB"
    return [Verdict(name, goal, f"{sent / 1e6:.1f} MB", sent <= HEADERS * floor)]


def _cpu(found: Measured) -> list[Verdict]:
    cube = {r.label: r.block_cpu_s for r in found.results if r.row == CUBE}
    if not cube.keys() >= {MEGALITE.label, ONE_PROCESS.label}:
        return []
    ratio = median_ratio(cube[MEGALITE.label], cube[ONE_PROCESS.label])
    return [Verdict(CUBE, f"CPU s at most {CUBE_CPU:.2f}x of one process", f"{ratio:.2f}x", ratio <= CUBE_CPU)]
