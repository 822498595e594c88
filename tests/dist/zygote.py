"""The child side of the rank pool: a server process that forks gloo ranks, and what a rank does.

The server is a fresh process that imports torch once and never starts a thread, so forking from it is safe whatever
pytest, hypothesis or OpenMP did in the test process, and costs 0.1 s per pool. Ranks end when their connection closes;
the server kills those that are left when its own control connection closes, so nothing outlives the test process.
"""

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import sys
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import send_handle

import torch
import torch.distributed as dist

GROUP_TIMEOUT_S = 300.0
"""Limit of the pools' process groups: longer than a test's limit, which reports more."""
OK = b"+"
FAILED = b"-"
"""First byte of an answer."""


def serve(control_fd: int) -> None:
    """Obey the test process until it closes the control connection.

    Requests: ("fork", world, directory, module, sys_path) imports the module, so that ranks need not each do it,
    answers the pids, then hands over one connection per rank; ("end", pids) kills those that still run and answers
    how each pid ended.
    """
    torch.set_num_threads(1)
    control = Connection(control_fd)
    alive: set[int] = set()
    try:
        while True:
            request, *details = control.recv()
            if request == "fork":
                alive.update(_fork_pool(control, *details))
            else:
                control.send(_end(details[0]))
                alive.difference_update(details[0])
    except (EOFError, ConnectionError):
        _end(list(alive))


def _fork_pool(control: Connection, world: int, directory: str, module: str, sys_path: list[str]) -> list[int]:
    sys.path[:] = sys_path
    with contextlib.suppress(Exception):  # the ranks' own import reports it
        importlib.import_module(module)
    num_threads = len(os.listdir("/proc/self/task"))
    assert num_threads == 1, f"the rank server has {num_threads} threads: a fork would copy their locks"
    pids, ends = [], []
    for rank in range(world):
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            for connection in (control, ours, *ends):  # so that the test process's end is the only other one
                connection.close()
            _rank(theirs, rank, world, directory)
        theirs.close()
        pids.append(pid)
        ends.append(ours)
    control.send(pids)
    for end in ends:
        send_handle(control, end.fileno(), None)
        end.close()
    return pids


def _end(pids: list[int]) -> dict[int, str]:
    """How each process ended by itself within half a second; those that did not are killed."""
    ends: dict[int, str] = {}
    limit = time.monotonic() + 0.5
    while len(ends) < len(pids) and time.monotonic() < limit:
        for pid in set(pids) - set(ends):
            ended, status = os.waitpid(pid, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if ended else 0
            if ended:
                ends[pid] = f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        time.sleep(0.005)
    for pid in set(pids) - set(ends):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        ends[pid] = "was killed by the pool"
    return ends


def _rank(connection: Connection, rank: int, world: int, directory: str) -> None:
    """Join the process group, then run tasks until the connection closes. Never returns."""
    log = os.open(f"{directory}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory}/store",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=GROUP_TIMEOUT_S),
        )
        connection.send_bytes(OK + pickle.dumps(None))
        while True:
            connection.send_bytes(_task(connection.recv_bytes(), rank, world))
    except (EOFError, ConnectionError):
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _task(message: bytes, rank: int, world: int) -> bytes:
    """Run one task from a clean torch state; answers OK or FAILED, then the pickled result or traceback."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    try:
        path, module, qualname, args = pickle.loads(message)
        sys.path[:] = path
        function = importlib.import_module(module)
        for name in qualname.split("."):
            function = getattr(function, name)
        return OK + pickle.dumps(function(rank, world, *pickle.loads(args)))
    except Exception:
        return FAILED + pickle.dumps(traceback.format_exc())
    finally:
        gc.collect()
