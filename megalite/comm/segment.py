"""Shared memory of the ranks of one host: files in /dev/shm that have no name any more once all ranks have mapped them.

Invariant: nothing is left behind. The creator takes the name away as soon as everyone has the memory, so a normal exit,
an exception and a kill all free it. A name that a kill between creation and removal leaves says who created it; the
next job that starts here removes names whose creator (pid and start time) is dead.
"""

import contextlib
import errno
import itertools
import mmap
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megalite import native

SHM_DIR = Path("/dev/shm")
_NAME = re.compile(r"megalite-(\d+)-(\d+)-(\d+)-\d+")
_COUNTER = itertools.count()
_HUNDREDTHS = 22
"""Field of /proc/<pid>/stat, counted from 1: the start of the process after boot."""


class SegmentError(RuntimeError):
    """Shared memory can't be had; the message says why and on which rank. The same on all ranks.

    no_space: a smaller segment may fit.
    """

    def __init__(self, text: str, *, no_space: bool):
        super().__init__(text)
        self.no_space = no_space


@dataclass(frozen=True)
class Process:
    """Who a process is: pids are used again, so its start time counts too."""

    pid: int
    start: int

    @property
    def alive(self) -> bool:
        """Whether it runs; a zombie does not."""
        found = _stat(self.pid)
        return found is not None and found[1] == self.start and found[0] not in "ZX"


def shared_memory_missing() -> str | None:
    """Why this machine's CPU ranks can't share memory, or None."""
    if native.load() is None:
        return f"the compiled extension is missing ({native.why_missing()})"
    if not os.access(SHM_DIR, os.W_OK | os.X_OK):
        return f"{SHM_DIR} is not there or not writable"
    return None


def this_process() -> Process:
    """The calling process."""
    return process_of(os.getpid())


def process_of(pid: int) -> Process:
    """A running process by its pid."""
    found = _stat(pid)
    return Process(pid, found[1] if found else -1)


def _stat(pid: int) -> tuple[str, int] | None:
    """State and start time of a process; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before may hold anything
    return fields[0], int(fields[_HUNDREDTHS - 3])


def pid_namespace() -> int:
    """Which pid namespace this process's pids are from; containers that share /dev/shm may differ."""
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


def sweep() -> list[str]:
    """Remove names in /dev/shm that dead creators of this project left; returns them."""
    here, removed = pid_namespace(), []
    for path in sorted(SHM_DIR.glob("megalite-*")):
        match = _NAME.fullmatch(path.name)
        if match is None or int(match[1]) != here or Process(int(match[2]), int(match[3])).alive:
            continue
        with contextlib.suppress(OSError):  # another start was faster, or it is another user's
            path.unlink()
            removed.append(path.name)
    return removed


def create(num_bytes: int) -> str:
    """Make a named segment of zeros whose pages are all there, and return its name.

    Raises:
        OSError: no space (ENOSPC), no /dev/shm, no right to write.
    """
    room = min(free_bytes(), _available_memory())
    if num_bytes > room:  # asked before, since filling the memory to find out could get other processes killed
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    me = this_process()
    name = f"megalite-{pid_namespace()}-{me.pid}-{me.start}-{next(_COUNTER)}"
    fd = os.open(SHM_DIR / name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, num_bytes)  # a full /dev/shm is an error here instead of a SIGBUS at the first write
    except OSError:
        remove(name)
        raise
    finally:
        os.close(fd)
    return name


def attach(name: str, num_bytes: int) -> Tensor:
    """Map a segment; it lives as long as the tensor and its views.

    Returns:
        (num_bytes,) uint8 in shared memory.

    Raises:
        OSError: it is not there, or smaller.
    """
    fd = os.open(SHM_DIR / name, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size < num_bytes:
            raise OSError(f"{SHM_DIR / name} has {os.fstat(fd).st_size} bytes, {num_bytes} are needed")
        memory = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(fd)
    return torch.frombuffer(memory, dtype=torch.uint8)


def remove(name: str) -> None:
    """Take the name away; the memory stays for those who have it mapped."""
    with contextlib.suppress(FileNotFoundError):
        (SHM_DIR / name).unlink()


def share(wanted: dict[tuple[int, ...], int], *, rank: int, pg: dist.ProcessGroup) -> dict[tuple[int, ...], Tensor]:
    """Create and map segments for several sets of ranks at once.

    Collective over `pg`: every rank names the sets that it is in; the first rank of a set creates its segment.

    Args:
        wanted: global ranks of a set -> bytes; the ranks of a set agree on both.
        rank:   this process's global rank.
        pg:     a CPU process group that holds all ranks of all sets; its time limit bounds the waits.

    Returns:
        global ranks of a set -> (bytes,) uint8, zeros at first.

    Raises:
        SegmentError: on all ranks alike, if any rank could not create or map.
    """
    created: dict[tuple[int, ...], str] = {}
    try:
        problem = _try(lambda: _create_own(wanted, rank, created))
        rows = gather_objects((created, problem), pg)
        _raise_first([problem for _, problem in rows])
        names = {ranks: name for row, _ in rows for ranks, name in row.items()}
        segments: dict[tuple[int, ...], Tensor] = {}
        problem = _try(lambda: segments.update({r: attach(names[r], size) for r, size in wanted.items()}))
        _raise_first(gather_objects(problem, pg))
    finally:
        for name in created.values():
            remove(name)
    return segments


def gather_objects(mine: object, pg: dist.ProcessGroup) -> list:
    """Everyone's object, in rank order of the group."""
    rows = [None] * dist.get_world_size(pg)
    dist.all_gather_object(rows, mine, group=pg)
    return rows


def _create_own(wanted: dict[tuple[int, ...], int], rank: int, created: dict[tuple[int, ...], str]) -> None:
    """Fills `created` one by one, so that a failure half-way leaves nothing."""
    sweep()
    for ranks, num_bytes in wanted.items():
        if ranks[0] == rank:
            created[ranks] = create(num_bytes)


def _try(work: Callable[[], None]) -> tuple[str, bool] | None:
    """None, or what the system said and whether it is a lack of space."""
    try:
        work()
    except OSError as error:
        no_space = error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)
        return f"{error.strerror or error} ({SHM_DIR}, {free_bytes() >> 20} MiB free)", no_space
    return None


def free_bytes() -> int:
    """Room in /dev/shm; 0 where there is none."""
    try:
        stat = os.statvfs(SHM_DIR)
    except OSError:
        return 0
    return stat.f_bavail * stat.f_frsize


def _available_memory() -> int:
    """Bytes that the host can give without swapping."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else 2**63


def _raise_first(problems: list[tuple[str, bool] | None]) -> None:
    for position, problem in enumerate(problems):
        if problem:
            text, no_space = problem
            raise SegmentError(f"no shared memory on rank {position} of {len(problems)}: {text}", no_space=no_space)
