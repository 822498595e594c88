"""Pools of gloo ranks for tests: forked once per world size, reused by every test, every wait limited.

`run_ranks(4, work, x)` calls `work(rank, 4, x)` on four processes that share a default process group and returns the
four results. Functions travel by name, so they are defined at module level; arguments and results are pickled, tensors
by value. After any failure the whole pool is ended and a fresh one is forked for the next test.
"""

import atexit
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megalite.comm.attach import attach_channels
from megalite.config.schema import Comm
from megalite.mesh import Mesh, Sizes, build_mesh
from tests.dist.zygote import GROUP_TIMEOUT_S, OK

START_LIMIT_S = 120.0
"""For the import of torch by the server and the rendezvous of a new pool."""
GRACE_S = 2.0
"""After one rank failed, what the others get to finish or fail too, before their stacks are taken."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TRITON_INTERPRET": "1"}
"""Of the ranks; triton reads its when it is imported, which no rank does by itself."""
MAX_MESHES = 6
"""Meshes that a rank keeps: each holds up to eight gloo groups, with threads and sockets."""


class RankError(AssertionError):
    """At least one rank raised, died or ran past the limit. `ranks` maps each failed rank to what is known of it."""

    def __init__(self, title: str, ranks: dict[int, str]):
        self.ranks = ranks
        same: dict[str, list[int]] = {}
        for rank in sorted(ranks):
            same.setdefault(ranks[rank], []).append(rank)
        super().__init__("\n".join([title, *(f"--- rank {who} {text}" for text, who in same.items())]))


def run_ranks(world: int, fn: Callable, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Call `fn(rank, world, *args)` on each of `world` ranks and return the results in rank order.

    Raises:
        RankError: with every rank's traceback, how dead ranks died, and the Python stacks of ranks that hang.
    """
    if "<" in fn.__qualname__:
        raise ValueError(f"{fn.__qualname__} can't be imported by the ranks; define it at module level")
    return SERVER.pool(world, fn.__module__).run(fn, args, timeout_s)


class Server:
    """The test process's side of the forking server; started by the first use or by `start()`."""

    def __init__(self) -> None:
        self.process: subprocess.Popen | None = None
        self.control: Connection | None = None
        self.pools: dict[int, Pool] = {}
        self.directory: tempfile.TemporaryDirectory | None = None
        self.num_pools = 0

    def start(self) -> None:
        """Start the server if it does not run; returns at once, while the server imports torch."""
        if self.process is not None:
            return
        self.directory = tempfile.TemporaryDirectory(prefix="rank_pool_")
        self.control, theirs = Pipe()
        root = str(Path(__file__).resolve().parents[2])
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"from tests.dist.zygote import serve; serve({theirs.fileno()})"],
            pass_fds=[theirs.fileno()],
            cwd=root,
            env=os.environ | ENVIRONMENT | {"PYTHONPATH": root},
        )
        theirs.close()
        atexit.register(self.stop)

    def stop(self) -> None:
        """End all ranks and the server."""
        if self.process is None:
            return
        for pool in list(self.pools.values()):
            pool.end()
        self.control.close()
        self.process.wait(START_LIMIT_S)
        self.directory.cleanup()
        self.process = None
        atexit.unregister(self.stop)

    def pool(self, world: int, module: str) -> "Pool":
        """The pool of that size, forked now if there is none, after an import of the module that it first needs."""
        self.start()
        if world not in self.pools:
            directory = Path(self.directory.name) / f"pool{self.num_pools}"
            directory.mkdir()
            self.num_pools += 1
            self.control.send(("fork", world, str(directory), module, sys.path))
            pids = self.answer()
            connections = [Connection(recv_handle(self.control)) for _ in pids]
            self.pools[world] = Pool(self, pids, connections, directory)
            self.pools[world].collect({}, time.monotonic() + START_LIMIT_S, f"rendezvous of {world} ranks")
        return self.pools[world]

    def answer(self) -> Any:
        """The server's next answer."""
        if not self.control.poll(START_LIMIT_S):
            raise TimeoutError(f"the rank server did not answer within {START_LIMIT_S} s")
        return self.control.recv()


class Pool:
    """Ranks that share one default process group."""

    def __init__(self, server: Server, pids: list[int], connections: list[Connection], directory: Path):
        self.server = server
        self.pids = pids
        self.connections = connections
        self.directory = directory

    def run(self, fn: Callable, args: tuple, timeout_s: float) -> list[Any]:
        """Run one task on all ranks; see `run_ranks`."""
        logs = {rank: self._log_bytes(rank) for rank in range(len(self.pids))}
        message = pickle.dumps((sys.path, fn.__module__, fn.__qualname__, pickle.dumps(args)))
        for connection in self.connections:
            try:
                connection.send_bytes(message)
            except ConnectionError:
                continue  # a rank that died since the last task: collect() reads the end of its connection
        what = f"{fn.__qualname__} within {timeout_s} s on {len(self.pids)} ranks"
        try:
            return self.collect(logs, time.monotonic() + timeout_s, what)
        except RankError:
            raise  # the pool has ended
        except BaseException:  # e.g. a test's time limit: the replies that are still to come are nobody's
            self.end()
            raise

    def collect(self, logs: dict[int, int], limit: float, what: str) -> list[Any]:
        """One result of every rank; or end the pool and raise with what is known of the ranks that gave none."""
        results: dict[int, Any] = {}
        failed: dict[int, str] = {}
        dead: list[int] = []
        waiting = dict(enumerate(self.connections))
        while waiting and (left := limit - time.monotonic()) > 0:
            for ready in wait(list(waiting.values()), timeout=left):
                rank = self.connections.index(ready)
                del waiting[rank]
                try:
                    kind, content = _split(ready.recv_bytes())
                    (results if kind == OK else failed)[rank] = content
                except (EOFError, ConnectionError):
                    dead.append(rank)
                if failed or dead:
                    limit = min(limit, time.monotonic() + GRACE_S)
        if failed or dead or waiting:
            self._fail(failed, dead, list(waiting), logs, what)
        return [results[rank] for rank in sorted(results)]

    def _fail(self, failed: dict[int, str], dead: list[int], hung: list[int], logs: dict, what: str) -> None:
        for rank in hung:
            os.kill(self.pids[rank], signal.SIGUSR1)  # faulthandler writes the stacks of all threads to the log
        time.sleep(0.3 if hung else 0.0)
        ends = self.end()
        known = {rank: f"raised\n{text}" for rank, text in failed.items()}
        known |= {rank: f"{ends[rank]}\n{self._log(rank, logs)}" for rank in dead}
        known |= {rank: f"did not finish; its stacks:\n{self._log(rank, logs)}" for rank in hung}
        raise RankError(f"{what}: ranks {sorted(failed)} raised, {sorted(dead)} died, {sorted(hung)} hung", known)

    def end(self) -> list[str]:
        """End all ranks, and say how each ended."""
        self.server.pools = {world: pool for world, pool in self.server.pools.items() if pool is not self}
        for connection in self.connections:
            connection.close()
        self.server.control.send(("end", self.pids))
        ends = self.server.answer()
        return [ends[pid] for pid in self.pids]

    def _log_bytes(self, rank: int) -> int:
        log = self.directory / f"rank{rank}.log"
        return log.stat().st_size if log.exists() else 0

    def _log(self, rank: int, logs: dict[int, int]) -> str:
        log = self.directory / f"rank{rank}.log"
        return log.read_bytes()[logs.get(rank, 0) :].decode(errors="replace")[-6000:] if log.exists() else ""


def _split(answer: bytes) -> tuple[bytes, Any]:
    return answer[:1], pickle.loads(answer[1:])


SERVER = Server()

KEPT_MESHES: OrderedDict[tuple[Sizes, int, str], Mesh] = OrderedDict()


def mesh_for(sizes: Sizes, kv_replicas: int = 1, *, cpu_backend: str = "auto") -> Mesh:
    """In a rank: this rank's mesh of the whole pool, with an empty ledger; kept for later tasks.

    Every rank of the pool must ask for the same meshes in the same order. The groups of the least recently used mesh
    are destroyed when a rank would hold more than MAX_MESHES.
    """
    key = (sizes, kv_replicas, cpu_backend)
    if key not in KEPT_MESHES:
        while len(KEPT_MESHES) >= MAX_MESHES:
            _destroy(KEPT_MESHES.popitem(last=False)[1])
        mesh = build_mesh(sizes, device=torch.device("cpu"), timeout_s=GROUP_TIMEOUT_S, kv_replicas=kv_replicas)
        KEPT_MESHES[key] = attach_channels(mesh, Comm(cpu_backend=cpu_backend), timeout_s=GROUP_TIMEOUT_S)
    KEPT_MESHES.move_to_end(key)
    KEPT_MESHES[key].ledger.reset()
    return KEPT_MESHES[key]


def process_groups(mesh: Mesh) -> list[dist.ProcessGroup]:
    """The process groups of a mesh, without the axes of size 1."""
    axes = ("world", "pp", "pp_backward", "dp", "dp_replicate", "dp_shard", "tp", "kv", "tied")
    return [getattr(mesh, axis).pg for axis in axes if getattr(mesh, axis).pg is not None]


def _destroy(mesh: Mesh) -> None:
    for pg in process_groups(mesh):
        dist.destroy_process_group(pg)
