"""How gloo's threads and the computing one share a core.

gloo moves messages on threads of its own, which wake for every packet. By default such a thread interrupts the one that
computes, some thousand times a second, and each time the core's caches are filled anew. As batch threads (Linux'
SCHED_BATCH) they wait for the end of its time slice, a few milliseconds, and then move all that has come; a rank that
waits for a message leaves them its core at once.
"""

import os
from pathlib import Path

TASKS = Path("/proc/self/task")


def let_compute_go_first() -> int:
    """Make gloo's threads of this process batch threads; returns how many there are. Nothing where Linux' calls are
    missing or refused. Not for hosts with more ranks than cores: there a message would wait for other ranks' slices."""
    if not hasattr(os, "SCHED_BATCH") or not TASKS.exists():
        return 0
    return sum(_to_batch(task) for task in TASKS.iterdir())


def _to_batch(task: Path) -> bool:
    try:
        if "gloo" not in (task / "comm").read_text():
            return False
        os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))
    except OSError:  # it has ended, or a sandbox forbids the call
        return False
    return True
