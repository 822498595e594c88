"""Forked processes for the ranks of a verification, with time limits, progress, and every failure reported.

The parent computes nothing before the fork (torch then has no threads whose locks a fork could copy), so also the
one-device run is a child. No child outlives `run_children`, and none waits for the parent: a child whose parent is
gone ends with its work.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from megalite.comm.attach import attach_channels
from megalite.config.schema import Config
from megalite.mesh import build_mesh, single_device_mesh
from megalite.train.build import sizes_of
from megalite.verify.run import RankReport, Say, run_rank

GROUP_TIMEOUT_S = 120.0
"""Of collectives, unless run.timeout_s is shorter: a rank that waits for a fault tells where, before all are ended."""
GRACE_S = 3.0
"""After one child failed, what the others get to finish or to fail too."""
Heard = Callable[[str, str], None]
"""Told (child, what it begins)."""


class ChildrenError(RuntimeError):
    """Some child raised, died or ran past the limit; `texts` says what is known of each."""

    def __init__(self, texts: dict[str, str]):
        self.texts = texts
        super().__init__("\n".join(f"{name} {text}" for name, text in texts.items()))


@dataclass
class _Child:
    process: multiprocessing.Process
    connection: Connection
    last: str = "start"


def run_layout(
    configs: Mapping[str, tuple[Config, Config]], directory: str, *, limit_s: float, heard: Heard
) -> dict[str, tuple[list[RankReport], RankReport]]:
    """Run each (layout, one device) pair: the layouts one after the other on one set of ranks, beside one more process.

    Args:
        configs:   label -> (layout, one device); all layouts have the same mesh.
        directory: an empty one, for the ranks to meet in.

    Returns:
        label -> (the ranks' reports, the one-device report).

    Raises:
        ChildrenError
    """
    world = next(iter(configs.values()))[0].world_size
    layouts = {label: layout for label, (layout, _) in configs.items()}
    works: dict[str, Callable[[Say], Any]] = {
        f"rank {rank}": lambda say, rank=rank: _rank(layouts, rank, f"{directory}/store", say) for rank in range(world)
    }
    works["one device"] = lambda say: {
        label: run_rank(device, single_device_mesh(), say=_labelled(say, label), poison=False)
        for label, (_, device) in configs.items()
    }
    results = run_children(works, limit_s=limit_s, heard=heard)
    device = results.pop("one device")
    return {label: ([results[f"rank {r}"][label] for r in range(world)], device[label]) for label in configs}


def _rank(layouts: Mapping[str, Config], rank: int, store: str, say: Say) -> dict[str, RankReport]:
    config = next(iter(layouts.values()))
    timeout_s, sizes = min(config.run.timeout_s, GROUP_TIMEOUT_S), sizes_of(config)
    if sizes.world > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=sizes.world,
            timeout=timedelta(seconds=timeout_s),
        )
    mesh = build_mesh(sizes, device=torch.device("cpu"), timeout_s=timeout_s, kv_replicas=config.kv_replicas)
    mesh = attach_channels(mesh, config.comm, timeout_s=timeout_s)
    reports = {}
    for label, layout in layouts.items():
        reports[label] = run_rank(layout, mesh, say=_labelled(say, label), poison=label == next(iter(layouts)))
    if sizes.world > 1:
        dist.barrier()  # a rank that leaves early breaks the connections of those that still compute
        dist.destroy_process_group()
    return reports


def _labelled(say: Say, label: str) -> Say:
    return lambda text: say(f"{label}: {text}")


def run_children(works: Mapping[str, Callable[[Say], Any]], *, limit_s: float, heard: Heard) -> dict[str, Any]:
    """Call each work in its own forked process and return the results by name.

    Raises:
        ChildrenError: with every traceback, how a dead child died, and what a child that hangs had begun last.
    """
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    children: dict[str, _Child] = {}
    try:
        for name, work in works.items():
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(work, theirs), daemon=True)
            process.start()
            theirs.close()
            children[name] = _Child(process, ours)
        return _collect(children, time.monotonic() + limit_s, limit_s, heard)
    finally:
        for child in children.values():
            child.process.kill()
            child.process.join()
            child.connection.close()


def _child(work: Callable[[Say], Any], connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children
    torch.set_num_threads(1)

    def send(kind: str, content: Any) -> None:
        connection.send_bytes(pickle.dumps((kind, content)))

    try:
        result = work(lambda text: send("began", text))
        send("done", result)
    except BaseException:
        with contextlib.suppress(OSError):
            send("failed", traceback.format_exc())
    os._exit(0)  # not through the exit handlers that were forked with the parent


def _collect(children: dict[str, _Child], limit: float, limit_s: float, heard: Heard) -> dict[str, Any]:
    results: dict[str, Any] = {}
    failed: dict[str, str] = {}
    while (waiting := set(children) - set(results) - set(failed)) and (left := limit - time.monotonic()) > 0:
        by_connection = {children[name].connection: name for name in waiting}
        for connection in wait(list(by_connection), timeout=left):
            name = by_connection[connection]
            try:
                kind, content = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                kind, content = "failed", _how_it_died(children[name])
            if kind == "began":
                children[name].last = content
                heard(name, content)
            elif kind == "done":
                results[name] = content
            else:
                failed[name] = f"failed:\n{content}"
                limit = min(limit, time.monotonic() + GRACE_S)
    hung = [name for name in children if name not in results and name not in failed]
    for name in hung:
        how = "was waiting" if failed else f"did not finish within {limit_s:.0f} s"
        failed[name] = f"{how}; the last that it began was {children[name].last!r}"
    if failed:
        raise ChildrenError(failed)
    return results


def _how_it_died(child: _Child) -> str:
    child.process.join(1.0)
    code = child.process.exitcode
    how = f"died of {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with code {code}"
    return f"{how} after it began {child.last!r}"
