"""From the ends of this node's ranks to one exit code and one message about the failure that came first.

First means: the earliest moment at which it can have happened. A recorded exception carries its time; a rank that
ended without a word was noticed within the agent's polling interval. Errors about lost connections, and ends by the
agent's own SIGTERM, count only when there is nothing else, since they follow from another rank's end. What a rank has
recorded is why it failed, whatever ended its process afterwards; and a user's mistake that any rank recorded comes
before all ends without a record, whose times are only estimates.
"""

import re
import signal
import socket
from dataclasses import dataclass

from megalite.launch.elastic import POLL_S, Ended, Failure
from megalite.launch.errors import RankError

FOLLOWS = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|DistNetworkError|DistStoreError"
    r"|remote process exited|socket timeout|store.*timed? ?out|Timed out waiting .*ms for (recv|send)",
    re.IGNORECASE,
)
NOTICED_LATE_S = 2 * POLL_S


@dataclass(frozen=True)
class Outcome:
    """0 done, 2 the user's input is wrong, 3 stopped after saving, 1 anything else; and what to print, or ""."""

    code: int
    message: str = ""


def judge(ended: Ended, recorded: dict[int, RankError], *, num_ranks: int, stopped: int) -> Outcome:
    """The outcome of this node's part of a job.

    Args:
        recorded:  the failures that ranks wrote down.
        num_ranks: ranks of this node.
        stopped:   how many of them ended with 3, after saving.
    """
    causes = [f for f in ended.failures if f.code not in (0, 3)]
    ranks = {f.rank for f in causes} | recorded.keys()
    if any(error.exit_code == 2 for error in recorded.values()):
        ranks = recorded.keys()
    candidates = [_describe(rank, causes, recorded, num_ranks) for rank in ranks]
    if candidates:
        return min(candidates)[1]
    if stopped == num_ranks or any(f.code == 3 for f in ended.failures):
        return Outcome(3)
    if ended.signal is not None:
        name = _signal_name(ended.signal)
        saved = f"{stopped} of {num_ranks} ranks on this node had saved and ended by themselves"
        return Outcome(1, f"stopped by {name}: {saved}")
    return Outcome(0)


def _describe(
    rank: int, causes: list[Failure], recorded: dict[int, RankError], num_ranks: int
) -> tuple[tuple[bool, float, int], Outcome]:
    """When a rank failed, as something to sort by, and what to say of it."""
    failure = next((f for f in causes if f.rank == rank), None)
    error = recorded.get(rank)
    code = error.exit_code if error else failure.code
    when = error.time_s if error else failure.time_s - NOTICED_LATE_S
    follows = bool(code != 2 and FOLLOWS.search(error.text)) if error else code == -signal.SIGTERM
    return (follows, when, rank), _outcome(rank, code, failure, error, num_ranks)


def _outcome(rank: int, code: int, failure: Failure | None, error: RankError | None, num_ranks: int) -> Outcome:
    if code == 2:
        return Outcome(2, f"error: {error.text}" if error else f"rank {rank} refused its input (see above)")
    host, pid = (error.host, error.pid) if error else (socket.gethostname(), failure.pid)
    who = f"rank {rank} of this node's {num_ranks} (host {host}, pid {pid})"
    how = f"was ended by {_signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
    hint = "; out of memory? the kernel's log tells" if code == -signal.SIGKILL else ""
    said = f": {error.text}" if error else " and wrote no error"
    trace = f"{error.trace}\n" if error and error.trace else ""
    return Outcome(1, f"{trace}{who} {how}{said}{hint}")


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
