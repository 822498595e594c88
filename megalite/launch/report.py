"""From the ends of all ranks to one exit code and one message about the failure that came first.

First means: the earliest moment at which it can have happened. A recorded exception carries its time; a rank that ended
without a word failed no earlier than it was last seen alive. Errors about lost connections count only when there is no
other, since they follow from another rank's end.
"""

import re
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megalite.launch.children import Child
from megalite.launch.errors import RankError, read_errors

FOLLOWS = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|DistNetworkError|DistStoreError"
    r"|remote process exited|socket timeout|store.*timed? ?out|Timed out waiting .*ms for (recv|send)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Outcome:
    """0 done, 2 the user's input is wrong, 3 stopped after saving, 1 anything else; and what to print, or ""."""

    code: int
    message: str = ""


def judge(children: Sequence[Child], errors: Path) -> Outcome:
    """The job's outcome once every child has ended; `errors` is the directory of error files."""
    recorded = read_errors(errors)
    failed = [child for child in children if child.code not in (0, 3)]
    own = [child for child in failed if child.ended_by is None or child.code != -child.ended_by]
    if not failed:
        return Outcome(3 if any(child.code == 3 for child in children) else 0)
    if not own:
        return Outcome(1, _not_saved(failed))
    first = min(own, key=lambda child: _when(child, recorded.get(child.rank)))
    return _describe(first, recorded.get(first.rank), len(children))


def _when(child: Child, error: RankError | None) -> tuple[bool, float]:
    text = error.text if error else child.last_line()
    killed = error is None and child.code < 0
    return (not killed and bool(FOLLOWS.search(text)), error.time_s if error else child.alive_s)


def _describe(child: Child, error: RankError | None, num_ranks: int) -> Outcome:
    if child.code == 2:
        return Outcome(2, f"error: {error.text}" if error else f"rank {child.rank} refused its input (see above)")
    host, pid = (error.host, error.pid) if error else (socket.gethostname(), child.process.pid)
    who = f"rank {child.rank} of this node's {num_ranks} (host {host}, pid {pid})"
    words = error.text if error else child.last_line()
    how = f"was ended by {_signal_name(-child.code)}" if child.code < 0 else f"failed with exit code {child.code}"
    hint = "; out of memory? the kernel's log tells" if child.code == -signal.SIGKILL else ""
    said = f": {words}" if words else " and wrote no error"
    trace = f"{error.trace}\n" if error and error.trace else ""
    return Outcome(1, f"{trace}{who} {how}{hint}{said}")


def _not_saved(killed: Sequence[Child]) -> str:
    """All failures are the launcher's own doing: a stop that the ranks did not take in time."""
    names = ", ".join(f"{child.rank} ({_signal_name(-child.code)})" for child in killed)
    return f"stopped before all ranks had saved; ended by the launcher: rank {names}"


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
