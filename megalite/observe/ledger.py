"""Bytes on the wire, counted exactly where they are sent: per axis, op and call site.

Invariant: an entry is what this rank must send for the op with the standard ring or direct algorithm, so the sums over
ranks equal the planner's traffic. The ledger takes plain values and knows nothing of groups.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from megalite.observe.spans import Spans


class Entry(NamedTuple):
    """What is counted together: one op at one call site on one mesh axis."""

    axis: str
    op: str
    site: str


@dataclass
class Ledger:
    """Running totals of bytes sent by this rank and of calls; reset by whoever reports them."""

    sent_bytes: Counter = field(default_factory=Counter)
    calls: Counter = field(default_factory=Counter)
    spans: Spans | None = None
    """While a step is traced: where the time goes that calls block for."""

    def record(self, axis: str, op: str, site: str, sent_bytes: int) -> None:
        """Add one call of `op` that sends `sent_bytes` from this rank."""
        entry = (axis, op, site)
        if entry not in self.calls:
            entry = Entry(*entry)
        self.sent_bytes[entry] += sent_bytes
        self.calls[entry] += 1

    def by_axis(self) -> dict[str, int]:
        """Bytes sent per mesh axis."""
        totals: Counter = Counter()
        for entry, num_bytes in self.sent_bytes.items():
            totals[entry.axis] += num_bytes
        return dict(totals)

    def reset(self) -> None:
        """Forget all counts."""
        self.sent_bytes.clear()
        self.calls.clear()
