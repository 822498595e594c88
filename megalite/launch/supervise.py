"""Run all ranks of this node to their end, and say in one message which one failed first and why.

Not torchrun's agent: that one leaves orphans when it is killed, waits 30 s before it kills, and reports with a banner;
with no restarts nothing else of it is needed. Ranks see the same variables as under torchrun. A rank that fails (any
exit code but 0 and 3) ends the job within `settle_s + grace_s`; signals are forwarded, a second one kills.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megalite.launch.children import Child
from megalite.launch.report import Outcome, judge

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
POLL_S = 0.05
STOPPED = 3


@dataclass(frozen=True)
class Limits:
    """How long ranks may go on: after a failure until SIGTERM, from there until SIGKILL, and after a stop signal."""

    settle_s: float = 2.0
    grace_s: float = 3.0
    stop_s: float = 600.0


def supervise(
    command: Sequence[str], environments: Mapping[int, Mapping[str, str]], *, errors: Path, limits: Limits | None = None
) -> Outcome:
    """Run `command` once per rank in `environments` and return the job's exit code and message.

    No child is alive when it returns or raises. Call it from the main thread, as it handles signals meanwhile.

    Args:
        errors: directory in which failing ranks leave their error files (errors.record_error).
    """
    children: list[Child] = []
    with _inbox() as signals:
        try:
            for rank, env in environments.items():
                children.append(Child(rank, command, env))
            _watch(children, signals, limits or Limits())
        finally:
            for child in children:
                child.destroy()
    return judge(children, errors)


def _watch(children: list[Child], signals: list[int], limits: Limits) -> None:
    """Until all ranks ended: forward signals, and stop the rest when one fails or does not stop in time."""
    failed_s = stop_s = None
    while any([child.poll() for child in children]):  # a list: every child must be polled
        now = time.monotonic()
        codes = [child.code for child in children]
        if failed_s is None and any(code not in (None, 0, STOPPED) for code in codes):
            failed_s = now
        if signals:
            if stop_s is not None:
                return
            stop_s = now
            _send_all(children, signals[0])
            signals.clear()
        elif stop_s is None and STOPPED in codes:
            stop_s = now
        if stop_s is not None and now > stop_s + limits.stop_s:
            return
        if failed_s is not None and now > failed_s + limits.settle_s:
            return _end(children, limits.grace_s)
        time.sleep(POLL_S)


def _end(children: list[Child], grace_s: float) -> None:
    """SIGTERM, then a short wait; what is left is killed by the caller."""
    _send_all(children, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while any([child.poll() for child in children]) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _send_all(children: list[Child], number: int) -> None:
    for child in children:
        child.send(number)


@contextlib.contextmanager
def _inbox() -> Iterator[list[int]]:
    """Signals that arrived meanwhile, in order; the former handlers are put back."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    former = {number: signal.signal(number, lambda got, _: received.append(got)) for number in FORWARDED}
    try:
        yield received
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
