"""Kills a saving process at every point where it touches the file system. Run as a program, so that forking is safe.

`python -m tests.unit.checkpoint_deaths ROOT first|again` prints one JSON line per death: its point, the event it
happened at, the step that `latest` then finds, whether its values are right, and the steps after one more save.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import torch

from megalite.checkpoint import tensorfile
from megalite.checkpoint.keep import latest
from megalite.checkpoint.load import load
from tests.unit.checkpoint_cases import blank, random_tensors, save_alone, shards

_EVENTS = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree", "os.scandir", "write")


class Killer:
    """Counts this process's file system events and kills it at number `point`."""

    def __init__(self, point: int, root: Path) -> None:
        self.point, self.root, self.count, self.num_writes = point, str(root), 0, 0
        sys.addaudithook(self)
        whole = tensorfile._write

        def in_halves(file, data, digest):
            middle = len(data) // 2
            whole(file, data[:middle], digest)
            self.num_writes += 1
            if self.num_writes % 4 == 1:  # the deaths between them are alike
                self("write", (self.root,))
            whole(file, data[middle:], digest)

        tensorfile._write = in_halves

    def __call__(self, event: str, args: tuple) -> None:
        if event in _EVENTS and (isinstance(args[0], int) or self.root in str(args[0])):
            self.count += 1
            if self.count == self.point:
                os.write(1, json.dumps([event, os.path.basename(str(args[0]))]).encode())
                os.kill(os.getpid(), signal.SIGKILL)


def die_at(point: int, root: Path, step: int) -> list | None:
    """Save in a child that dies at `point`; return the event, or None when the save ended before."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writing, 1)
        Killer(point, root)
        save_alone(root, step, random_tensors(1000 + step), tp=2, dp=2, keep_last=2)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        text = told.read()
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0, "the save itself failed"
    return json.loads(text) if os.WIFSIGNALED(status) else None


def whole(root: Path, variants: dict[int, list[int]]) -> tuple[int, bool]:
    """The step that `latest` finds, and whether it loads to the values of one save of that step."""
    path = latest(root)
    one = shards(random_tensors(0), tp=1, dp=1)[0]
    blank(one)
    step = load(path, one.state)["step"]
    wants = [shards(random_tensors(seed), tp=1, dp=1)[0] for seed in variants[step]]
    same = [all(torch.equal(one.buffers[kind], want.buffers[kind]) for kind in one.buffers) for want in wants]
    return step, any(same)


def main(root: Path, mode: str) -> None:
    """Die at point 1, 2, ... until a save gets through. `again` saves a step that already exists."""
    os.fsync = lambda handle: None  # a killed process loses no page cache; this only saves time
    step = {"first": 30, "again": 20}[mode]
    template, work = root / "template", root / "work"
    for old in (10, 20):
        save_alone(template, old, random_tensors(old), tp=4)
    variants = {10: [10], 20: [20, 1020], 30: [1030]}
    point = 1
    while True:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(template, work)
        event = die_at(point, work, step)
        found, right = whole(work, variants)
        save_alone(work, 40, random_tensors(40), keep_last=2)
        left = sorted(p.name for p in work.iterdir())
        print(json.dumps({"point": point, "event": event, "step": found, "right": right, "left": left}), flush=True)
        if event is None:
            return
        point += 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])
