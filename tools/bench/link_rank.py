"""One rank behind a slow link: trains steps, and calls a step's collectives alone."""

import importlib
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from bench.data import batch
from bench.rank import steps
from bench.replay import Recorder, Replay
from bench.rows import Contestant, Row, Work

TIMEOUT_S = 300.0


def serve(connection, contestant: Contestant, row: Row, work: Work, weights: str) -> None:
    """Build, warm up and note a step's collectives, say how many there are; then answer commands until None comes.

    (`step`, first, number) is answered with rank.Done, (`comm`, number) with the seconds of each replay.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    trainer = importlib.import_module(f"bench.{contestant.side}").Trainer(row, work, contestant.variant, weights)
    trainer.step(*batch(work, 0), 0)
    trainer.finish()
    with Recorder() as recorder:
        trainer.step(*batch(work, 1), 1)
        trainer.finish()
    replay = Replay(recorder.calls)
    connection.send(len(recorder.calls))
    while (command := connection.recv()) is not None:
        what, *arguments = command
        connection.send(steps(trainer, work, *arguments) if what == "step" else comm_s(replay, *arguments))
    dist.barrier()
    dist.destroy_process_group()


def comm_s(replay: Replay, number: int) -> list[float]:
    """Seconds of each run through the collectives."""
    found = []
    for _ in range(number):
        dist.barrier()
        start = time.perf_counter()
        replay.run()
        found.append(time.perf_counter() - start)
    return found
