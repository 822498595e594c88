"""What a rank did when, in one traced step: named spans, kept in the order in which they began.

Nothing is recorded, and nothing is spent, but while somebody has hung a `Spans` into the ledger. On a GPU the marks are
events on the current stream: a span is the time that the stream took, and a wait the time that it stood still.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from megalite.observe.timers import clock_of

Kind = Literal["step", "action", "message", "collective", "update"]
"""The whole step; an action of the schedule; a wait for a message; the time in which a collective blocks; the update
of the weights. Waits lie inside of actions, or between them."""


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds are counted from the moment at which the recording began."""

    name: str
    kind: Kind
    start_s: float
    end_s: float


class Spans:
    """Records from its making on.

    Args:
        limit: spans beyond it are dropped and counted in `num_dropped`, which bounds the memory.
    """

    def __init__(self, device: torch.device | str = "cpu", *, limit: int) -> None:
        device = torch.device(device)
        self._clock = clock_of(device)
        self._marks: list[tuple[str, Kind, object, object]] = []
        self.limit = limit
        self.num_dropped = 0
        self._origin = self._clock.mark()
        self._clock.seconds(self._origin, self._origin)  # on a GPU: wait until the device is there
        self.origin_s = time.perf_counter()
        """The host's time of the first moment."""

    @contextmanager
    def span(self, name: str, kind: Kind) -> Iterator[None]:
        """Record the body of a `with`; also when it raises."""
        begin = self._clock.mark()
        at = len(self._marks)
        if at >= self.limit:
            self.num_dropped += 1
            yield
            return
        self._marks.append((name, kind, begin, begin))
        try:
            yield
        finally:
            self._marks[at] = (name, kind, begin, self._clock.mark())

    def take(self) -> list[Span]:
        """All spans, outer ones before what they hold; on a GPU waits for the last one's end."""
        seconds = self._clock.seconds
        return [
            Span(name, kind, seconds(self._origin, begin), seconds(self._origin, end))
            for name, kind, begin, end in self._marks
        ]
