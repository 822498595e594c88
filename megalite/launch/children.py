"""One child process per rank: started in a session of its own, watched, and never left behind.

Invariant: when the launcher ends, for whatever reason, its ranks end. In the usual case it kills their process groups;
if it is itself killed, the kernel sends each rank SIGKILL (PR_SET_PDEATHSIG).
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

PR_SET_PDEATHSIG = 1
TAIL_BYTES = 8192
PRCTL = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None


class Child:
    """One rank's process. Its stderr passes through to ours, and the end of it is kept for the report.

    code:      the exit code, minus the signal number when a signal ended it, None while it runs.
    alive_s:   the last moment (time.time) at which it was seen running: no failure of it is earlier.
    ended_by:  the last signal that the launcher sent, None if it sent none.
    """

    def __init__(self, rank: int, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.rank = rank
        self.code: int | None = None
        self.alive_s = time.time()
        self.ended_by: int | None = None
        self.process = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_die_with(os.getpid()),
        )
        self._tail = bytearray()
        self._reader = threading.Thread(target=self._pass_stderr, name=f"stderr of rank {rank}", daemon=True)
        self._reader.start()

    def poll(self) -> bool:
        """Whether it still runs; keeps `code` and `alive_s` up to date."""
        if self.code is None:
            now = time.time()
            self.code = self.process.poll()
            if self.code is None:
                self.alive_s = now
        return self.code is None

    def send(self, number: int) -> None:
        """Send a signal to the rank alone, if it runs."""
        if self.poll():
            self.ended_by = number
            self.process.send_signal(number)

    def destroy(self) -> None:
        """Kill the rank and every process that it started, and reap it."""
        if self.poll():
            self.ended_by = signal.SIGKILL
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        self.code = code if self.code is None else self.code
        self._reader.join(timeout=1.0)

    def last_line(self) -> str:
        """The last line that it wrote to stderr, or ""."""
        lines = bytes(self._tail).decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""

    def _pass_stderr(self) -> None:
        with self.process.stderr as pipe:
            while block := pipe.read1(65536):
                self._tail += block
                del self._tail[:-TAIL_BYTES]
                sys.stderr.write(block.decode(errors="replace"))
                sys.stderr.flush()


def _die_with(parent: int) -> Callable[[], None] | None:
    """What the child runs before exec so that it can't outlive a killed launcher; None where there is no prctl."""
    if PRCTL is None:
        return None

    def prepare() -> None:
        PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the launcher died before the line above
            os._exit(1)

    return prepare
