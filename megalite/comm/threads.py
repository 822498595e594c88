"""How the threads of a host's CPU ranks share its cores.

A thread that wakes up may interrupt the one that computes, and each time the core's caches are filled anew. A batch
thread (Linux' SCHED_BATCH) waits for the end of the other's time slice, a few milliseconds, or until it waits itself.
gloo moves messages on threads of its own, which wake for every packet: as batch threads they move all that has come
meanwhile at once. Where a host has more ranks than cores, the computing threads are batch threads as well, so that a
rank that wakes up does not interrupt another one.
"""

import os
from pathlib import Path

TASKS = Path("/proc/self/task")


def let_compute_go_on(*, crowded: bool) -> int:
    """Make gloo's threads of this process batch threads, or all of them; returns how many became some. Nothing where
    Linux' calls are missing or refused.

    Args:
        crowded: this host has more ranks than cores.
    """
    if not hasattr(os, "SCHED_BATCH") or not TASKS.exists():
        return 0
    return sum(_to_batch(task) for task in TASKS.iterdir() if crowded or _is_gloos(task))


def _is_gloos(task: Path) -> bool:
    try:
        return "gloo" in (task / "comm").read_text()
    except OSError:  # it has ended
        return False


def _to_batch(task: Path) -> bool:
    try:
        os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))
    except OSError:  # it has ended, or a sandbox forbids the call
        return False
    return True
