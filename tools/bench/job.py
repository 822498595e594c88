"""The rank processes of one contestant, started afresh and driven over pipes.

It imports no torch: the ranks import this module again, and shall hold nothing but their own side.

Invariant: between two commands all ranks are stopped, so another contestant can be measured meanwhile. Every wait has a
limit; the first rank that fails is reported with its log, and the others are ended.

[Note: stopped ranks] Ranks that only slept would go on to cost time: a gloo group has a thread that wakes 100 times a
second and takes 1.4 ms of it (by sampling), so two contestants of eight ranks with eight groups 9% of two cores.
"""

import importlib
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

from bench import network
from bench.rows import Contestant, Row, Work
from megalite.launch.child import end_with_parent

START_LIMIT_S, BLOCK_LIMIT_S, END_LIMIT_S = 400.0, 600.0, 20.0


class JobError(RuntimeError):
    """A rank failed or was silent for too long."""


@dataclass(frozen=True)
class Block:
    """Some steps of a contestant. wall_s: the slowest rank's, per step. cpu_s: sum over ranks, per step.

    wire_bytes: per step over all ranks; None where it can't be measured.
    """

    losses: list[float]
    wall_s: list[float]
    cpu_s: list[float]
    wire_bytes: float | None
    peak_rss_bytes: list[int]
    traffic: dict[str, float] | None = None
    """Payload bytes per step over all ranks by `axis op`, where the contestant keeps an account."""


class Job:
    """A contestant's ranks. Use as a context; `run` when `__enter__` is through."""

    def __init__(self, contestant: Contestant, row: Row, work: Work, *, weights: str, logs: Path, counted: bool):
        self.row, self.contestant, self.counted = row.of(contestant), contestant, counted
        self.calls = [("serve", contestant, self.row, work, weights)] * self.row.world_size
        self.log = logs / f"{row.name}-{contestant.label.replace(' ', '_')}.log"

    def __enter__(self) -> "Job":
        with network.own_network() if self.counted else nullcontext():
            self.ranks = Ranks(self.calls, self.log)
        self.ranks.answers(START_LIMIT_S)
        return self

    def __exit__(self, kind, *_) -> None:
        self.ranks.end(polite=kind is None)

    def run(self, first: int, number: int) -> Block:
        """Train on steps first, first + 1, ..."""
        before = network.sent_bytes(self.ranks.pid) if self.counted else 0
        done = self.ranks.ask((first, number), BLOCK_LIMIT_S)
        if self.counted:
            wire = (network.sent_bytes(self.ranks.pid) - before) / number
        else:
            wire = None if done[0].traffic is None else sum(sum(rank.traffic.values()) for rank in done) / number
        return Block(
            losses=done[0].losses,
            wall_s=[max(times) for times in zip(*(rank.wall_s for rank in done), strict=True)],
            cpu_s=[sum(times) for times in zip(*(rank.cpu_s for rank in done), strict=True)],
            wire_bytes=wire,
            peak_rss_bytes=[rank.peak_rss_bytes for rank in done],
            traffic=added([rank.traffic for rank in done], number),
        )


def added(traffic: list[Counter | None], number: int) -> dict[str, float] | None:
    """The ranks' accounts of `number` steps as one, per step."""
    if None in traffic:
        return None
    return {key: num_bytes / number for key, num_bytes in sum(traffic, Counter()).items()}


@dataclass(frozen=True)
class Host:
    """Where a rank runs: entered while its process is started; its variables win over those of a job on one host."""

    entered: Callable[[], AbstractContextManager] = nullcontext
    environment: dict[str, str] = field(default_factory=dict)


class Ranks:
    """Processes with a pipe each. Use as a context where nothing else ends them: a stopped process does not end by
    itself, and Python waits for its processes when it exits.

    Args:
        calls: per rank a function of bench.rank (`serve`) or of another module of this folder (`comm_rank.serve`), and
            its arguments after the connection.
        hosts: one for each rank; all here without them.
    """

    def __init__(self, calls: list[tuple], log: Path, *, hosts: Sequence[Host] = ()):
        context = get_context("spawn")
        self.log = log
        self.pipes, self.processes = [], []
        hosts = hosts or [Host()] * len(calls)
        with hosts[0].entered():
            port = network.free_port()
        for rank, (call, host) in enumerate(zip(calls, hosts, strict=True)):
            ours, theirs = context.Pipe()
            environment = _environment(rank, len(calls), port) | host.environment
            process = context.Process(target=_main, args=(theirs, environment, str(log), call), daemon=True)
            with host.entered():
                process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    @property
    def pid(self) -> int:
        """Of the first rank."""
        return self.processes[0].pid

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, kind, *_) -> None:
        self.end(polite=kind is None)

    def ask(self, command: Any, limit_s: float) -> list[Any]:
        """Send a command to every rank; one answer of each, in rank order.

        Raises:
            JobError: as answers().
        """
        self._tell(command)
        return self.answers(limit_s)

    def _tell(self, command: Any) -> None:
        self._signal(signal.SIGCONT)
        for pipe in self.pipes:
            pipe.send(command)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def answers(self, limit_s: float) -> list[Any]:
        """What each rank says next, in rank order (`ready` after the start); then all are stopped until the next
        command, see [Note: stopped ranks].

        Raises:
            JobError: a rank failed or ended, or the limit passed; the ranks are ended.
        """
        until = time.monotonic() + limit_s
        answers: dict[int, Any] = {}
        while len(answers) < len(self.pipes):
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            ready = connection.wait(waiting, timeout=max(0.0, until - time.monotonic()))
            if not ready:
                self._fail(f"no answer within {limit_s:g} s")
            for pipe in ready:
                rank = self.pipes.index(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    self._fail(f"rank {rank} ended")
                if isinstance(answers[rank], _Failure):
                    self._fail(f"rank {rank}: {answers[rank].text}")
        self._signal(signal.SIGSTOP)
        return [answers[rank] for rank in range(len(self.pipes))]

    def _fail(self, text: str) -> None:
        self.end(polite=False)
        tail = self.log.read_text(errors="replace").splitlines()[-20:] if self.log.exists() else []
        raise JobError("\n  ".join([text, *tail]))

    def end(self, *, polite: bool) -> None:
        """Ask the ranks to end, and end those that do not."""
        if polite:
            self._tell(None)
        for process in self.processes:
            process.join(END_LIMIT_S if polite else 0)
            if process.is_alive():
                process.kill()
                process.join()


@dataclass(frozen=True)
class _Failure:
    text: str


def prepare_weights(work: Work, path: Path) -> None:
    """Have megalite's initial weights written, in a process of its own."""
    with Ranks([("write_weights", work, str(path))], path.with_suffix(".log")) as ranks:
        ranks.answers(START_LIMIT_S)


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """torchrun's variables, and one thread."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }


def _main(pipe, environment: dict[str, str], log: str, call: tuple) -> None:
    """A rank: everything it prints goes to the log. The environment is set before torch is imported."""
    end_with_parent()
    os.environ.update(environment)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, sys.stdout.fileno())
    os.dup2(out, sys.stderr.fileno())
    name, *arguments = call
    module, _, function = name.rpartition(".")
    try:
        getattr(importlib.import_module(f"bench.{module or 'rank'}"), function)(pipe, *arguments)
    except Exception as error:
        traceback.print_exc()
        pipe.send(_Failure(f"{type(error).__name__}: {error}"))
