"""Named spans of time. On a GPU they are pairs of events on the current stream, so measuring does not stop the device.

Invariant: time outside of any span is in no total, so saving and evaluating never count as training.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _HostClock:
    """Marks are moments of this process."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class _DeviceClock:
    """Marks are events on the current stream of the device."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._device = device

    def mark(self) -> torch.Event:
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def seconds(self, begin: torch.Event, end: torch.Event) -> float:
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def clock_of(device: torch.device) -> _HostClock | _DeviceClock:
    """What gives marks, and the seconds between two of them."""
    return _HostClock() if device.type == "cpu" else _DeviceClock(device)


class Timers:
    """Adds up the time of named spans until `take` is called. Spans of different names may nest."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._clock = clock_of(torch.device(device))
        self._marks: list[tuple[str, object, object]] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the body of a `with` under `name`; also when it raises."""
        begin = self._clock.mark()
        try:
            yield
        finally:
            self._marks.append((name, begin, self._clock.mark()))

    def take(self) -> dict[str, float]:
        """Seconds per name since the last call, and start anew. On a GPU waits for the last span's end."""
        marks, self._marks = self._marks, []
        totals: dict[str, float] = {}
        for name, begin, end in marks:
            totals[name] = totals.get(name, 0.0) + self._clock.seconds(begin, end)
        return totals
