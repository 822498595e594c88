"""Names in /dev/shm: nothing stays, whenever a process is killed; what others still use is left alone."""

import os
import random
import signal
import time

import pytest
import torch

from megalite.comm import segment
from megalite.comm.segment import SHM_DIR, Process, attach, create, process_of, remove, sweep, this_process

pytestmark = pytest.mark.skipif(not SHM_DIR.is_dir(), reason=f"this machine has no {SHM_DIR}")


def fork(work) -> tuple[int, int]:
    """A child that runs work(write end of a pipe) until it is killed; its pid and the read end."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work(writing)
        finally:
            os._exit(1)
    os.close(writing)
    return pid, reading


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def create_and_stay(pipe: int) -> None:
    os.write(pipe, create(4096).encode())
    time.sleep(60)


def create_and_remove_forever(pipe: int) -> None:
    os.write(pipe, b"begun")
    while True:
        remove(create(1 << 16))


def names_of(pid: int) -> list[str]:
    """Names that a process created."""
    return [path.name for path in SHM_DIR.glob("megalite-*") if path.name.split("-")[2] == str(pid)]


def test_what_one_writes_the_other_reads_also_without_the_name():
    name = create(5000)
    first, second = attach(name, 5000), attach(name, 5000)
    remove(name)
    assert not (SHM_DIR / name).exists()
    assert not first.any()
    first[4999] = 7
    assert second[4999] == 7
    assert second.dtype == torch.uint8
    remove(name)  # may be gone


def test_too_small_or_missing_is_an_error():
    name = create(4096)
    with pytest.raises(OSError, match="4096 bytes, 8192 are needed"):
        attach(name, 8192)
    remove(name)
    with pytest.raises(FileNotFoundError):
        attach(name, 4096)


@pytest.mark.parametrize("scarce", ["free_bytes", "_available_memory"])
def test_no_space_is_an_error_before_any_memory_is_taken(monkeypatch, scarce):
    monkeypatch.setattr(os, "posix_fallocate", None)  # not to be called
    monkeypatch.setattr(segment, scarce, lambda: 5000)
    with pytest.raises(OSError, match="No space"):
        create(5001)
    assert names_of(os.getpid()) == []


def test_room_is_what_the_system_says():
    stat = os.statvfs(SHM_DIR)
    assert 0 <= segment.free_bytes() <= stat.f_blocks * stat.f_frsize
    assert 2**26 < segment._available_memory() < 2**50


def test_a_full_disk_in_the_middle_leaves_no_name(monkeypatch):
    def full(fd, offset, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        create(4096)
    assert names_of(os.getpid()) == []


def test_names_of_dead_creators_are_swept_and_no_others():
    """A name that its killed creator left; names of the living, of another pid namespace, and of somebody else."""
    child, pipe = fork(create_and_stay)
    left = os.read(pipe, 100).decode()
    os.close(pipe)
    assert left not in sweep()
    kill(child)
    mine, me = create(4096), this_process()
    foreign = f"megalite-{segment.pid_namespace() + 1}-{child}-1-0"
    again = f"megalite-{segment.pid_namespace()}-{me.pid}-{me.start + 1}-0"  # my pid, of an earlier process
    other = f"megalite-notes-{me.pid}"
    for name in (foreign, again, other):
        (SHM_DIR / name).touch()
    try:
        removed = sweep()
        assert {left, again} <= set(removed)
        assert not {mine, foreign, other} & set(removed)
        assert (SHM_DIR / mine).exists()
        assert names_of(child) == [foreign]
    finally:
        for name in (mine, foreign, again, other):
            remove(name)


def test_a_kill_at_any_moment_leaves_nothing_after_the_next_start():
    rng, left = random.Random(3), 0
    for _ in range(20):
        child, pipe = fork(create_and_remove_forever)
        os.read(pipe, 5)
        os.close(pipe)
        time.sleep(rng.random() * 0.003)
        kill(child)
        left += len(names_of(child))
        sweep()
        assert names_of(child) == []
    assert left > 0, "no kill came between creation and removal"


def test_processes_are_told_apart():
    me = this_process()
    assert me == process_of(os.getpid())
    assert me.alive
    assert not Process(me.pid, me.start + 1).alive
    assert not Process(2**22 + 1, 1).alive
    child, pipe = fork(lambda pipe: time.sleep(60))
    os.close(pipe)
    theirs = process_of(child)
    assert theirs.alive
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert not theirs.alive  # a zombie
    os.waitpid(child, 0)
    assert not theirs.alive
