"""A rank's side of `launch`: it ends with its launcher, and leaves word of how it ended.

Under torchrun or srun directly there is no error directory, and all of this does nothing.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from typing import NoReturn

from megalite.launch.errors import ERROR_DIR, record_error, record_stop

PR_SET_PDEATHSIG = 1


def started_by_launch(env: Mapping[str, str]) -> bool:
    """Whether `launch` waits for what this rank has to say."""
    return bool(env.get(ERROR_DIR)) and env.get("RANK", "").isdigit()


def end_with_launcher(env: Mapping[str, str]) -> None:
    """Have the kernel kill this rank when its launcher dies, also by kill -9."""
    if started_by_launch(env):
        end_with_parent()


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def report_error(env: Mapping[str, str], error: BaseException, *, exit_code: int) -> None:
    """Leave a failure for the launcher."""
    if started_by_launch(env) and exit_code not in (0, 3):
        record_error(env[ERROR_DIR], int(env["RANK"]), error, exit_code=exit_code)


def report_stop(env: Mapping[str, str]) -> None:
    """Leave word that this rank was stopped by a signal and its state is saved."""
    if started_by_launch(env):
        record_stop(env[ERROR_DIR], int(env["RANK"]))


def end_now(code: int) -> NoReturn:
    """End a rank that has failed, or was stopped, without the interpreter's teardown.

    In that teardown a thread of a process group that still holds a tensor of Python's asks for the interpreter's lock
    and is ended with the whole process ("terminate called without an active exception"), and the launcher's SIGTERM
    meets its default again: the exit code would be that of a signal.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more
            stream.flush()
    os._exit(code)
