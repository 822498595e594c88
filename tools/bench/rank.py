"""One rank of a contestant: builds it, then trains as many steps as it is told and reports what they took."""

import importlib
import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from bench.data import batch
from bench.rows import Contestant, Row, Work


@dataclass(frozen=True)
class Done:
    """What a block of steps took on one rank, per step; its own account of bytes sent, its peak memory.

    traffic: bytes sent in all steps by `axis op`, or None.
    """

    losses: list[float]
    wall_s: list[float]
    cpu_s: list[float]
    traffic: Counter | None
    peak_rss_bytes: int


def serve(connection, contestant: Contestant, row: Row, work: Work, weights: str) -> None:
    """Build, say `ready`, then answer (first step, number of steps) with Done until None comes."""
    torch.set_num_threads(1)
    if row.world_size > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    trainer = importlib.import_module(f"bench.{contestant.side}").Trainer(row, work, contestant.variant, weights)
    connection.send("ready")
    while (command := connection.recv()) is not None:
        connection.send(steps(trainer, work, *command))
    if row.world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


def write_weights(connection, work: Work, weights: str) -> None:
    """Write megalite's initial weights for the others."""
    importlib.import_module("bench.megalite_side").save_weights(work, weights)
    connection.send("ready")


def steps(trainer, work: Work, first: int, number: int) -> Done:
    """Train on steps first, first + 1, ..."""
    batches = [batch(work, step) for step in range(first, first + number)]
    before = trainer.traffic()
    losses, wall_s, cpu_s = [], [], []
    for step, (tokens, labels) in enumerate(batches, start=first):
        wall, cpu = time.perf_counter(), time.process_time()
        losses.append(trainer.step(tokens, labels, step))
        if step == first + number - 1:
            trainer.finish()  # else what runs on would be neither timed nor counted
        cpu_s.append(time.process_time() - cpu)
        wall_s.append(time.perf_counter() - wall)
    after = trainer.traffic()
    return Done(losses, wall_s, cpu_s, None if after is None else after - before, _peak_rss_bytes())


def _peak_rss_bytes() -> int:
    """Largest resident memory since this process began its program (getrusage's would include the parent's)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM; run this on Linux")
