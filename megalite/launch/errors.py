"""Error files: how a failing rank tells its launcher what happened, and which failure was the first.

A rank writes one small JSON file per failure, before it lets go of its connections; so its time is earlier than that of
the "connection closed" errors that follow on the other ranks. The first file of a rank stays.
"""

import json
import os
import socket
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

ERROR_DIR = "MEGALITE_ERROR_DIR"
"""The variable by which `launch` tells its ranks where to write; cli.py reads it."""


@dataclass(frozen=True)
class RankError:
    """One rank's failure. `text` is the message on one or a few lines, `trace` the traceback or ""."""

    rank: int
    host: str
    pid: int
    time_s: float
    exit_code: int
    text: str
    trace: str = ""


def record_error(directory: str | Path, rank: int, error: BaseException, *, exit_code: int = 1) -> None:
    """Write this rank's failure for the launcher; call it at once, before any process group is destroyed.

    Args:
        exit_code: 2 for a user's mistake (only its message is shown), 1 for anything else (with the traceback).
    """
    target = Path(directory) / f"rank{rank}.json"
    if target.exists():
        return
    text = str(error) if exit_code == 2 else "".join(traceback.format_exception_only(error)).strip()
    trace = "" if exit_code == 2 else "".join(traceback.format_exception(error)).rstrip()
    entry = RankError(rank, socket.gethostname(), os.getpid(), time.time(), exit_code, text, trace)
    part = target.with_suffix(".part")
    part.write_text(json.dumps(asdict(entry)))
    part.replace(target)


def read_errors(directory: str | Path) -> dict[int, RankError]:
    """All recorded failures by rank."""
    entries = (RankError(**json.loads(path.read_text())) for path in sorted(Path(directory).glob("rank*.json")))
    return {entry.rank: entry for entry in entries}


def record_stop(directory: str | Path, rank: int) -> None:
    """Note that this rank ends with exit code 3: stopped by a signal, its state saved."""
    (Path(directory) / f"rank{rank}.stopped").touch()


def count_stops(directory: str | Path) -> int:
    """How many ranks noted a stop."""
    return len(list(Path(directory).glob("rank*.stopped")))
