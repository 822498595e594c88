"""The training loop: step, report, evaluate, save, until the last step or a signal.

Invariant: every rank takes the same branches. Decisions come from the config, the step number or all-reduced values.
"""

import time
from dataclasses import dataclass

from megalite.data.loader import Loader
from megalite.observe.log import get_logger
from megalite.optim.lr import learning_rate
from megalite.train.build import Trainer
from megalite.train.evaluate import evaluate
from megalite.train.replicas import check_replicas
from megalite.train.report import Reporter
from megalite.train.signals import StopFlag
from megalite.train.state import save_state
from megalite.train.step import StepResult, train_step
from megalite.train.trace import make_tracer

MAX_SKIPPED = 10
"""Consecutive skipped steps after which a run stops: its weights no longer give finite losses, or its data trains no
token."""


class DivergedError(RuntimeError):
    """Too many steps in a row were not finite."""


@dataclass(frozen=True)
class Loaders:
    """Training and held-out batches; `valid` is None when data.split gives it no part."""

    train: Loader
    valid: Loader | None


def run_loop(trainer: Trainer, loaders: Loaders, reporter: Reporter | None, *, start: int, stop: StopFlag) -> bool:
    """Train from step start + 1 to run.steps; returns False when a signal ended it early (state saved).

    Args:
        reporter: on rank 0, else None.

    Raises:
        ReplicaError: copies that must be equal differ (run.check_replicas_every).
        RuntimeError: a collective of the last step failed, found when nothing is left to run; nothing is saved.
        DivergedError: MAX_SKIPPED steps in a row were skipped; weights and checkpoints are those from before them.
    """
    config = trainer.config
    skipped_in_a_row = 0
    tracer = make_tracer(trainer, start=start, tell=reporter.traced if reporter else None)
    for step in range(start + 1, config.run.steps + 1):
        rate = learning_rate(config.lr, step, config.run.steps)
        with tracer.step(step):
            began = time.perf_counter()
            trainer.mesh.ledger.reset()
            result = train_step(trainer, loaders.train.microbatches(step), lr=rate, stop=stop.requested)
            time_s = time.perf_counter() - began
        if reporter:
            reporter.step(step, result, lr=rate, time_s=time_s)
        skipped_in_a_row = skipped_in_a_row + 1 if result.skipped else 0
        if skipped_in_a_row == MAX_SKIPPED:
            raise DivergedError(_no_updates(result, step))
        if _due(step, config.run.check_replicas_every):
            check_replicas(trainer, step)
        last = step == config.run.steps or result.stop
        if loaders.valid and (last or _due(step, config.run.eval_every)):
            loss = evaluate(trainer, (loaders.valid.microbatches(i + 1) for i in range(config.run.eval_batches)))
            if reporter:
                reporter.evaluation(step, loss)
        if last:
            trainer.close_overlap()  # before a save that would pass for the last step; not after an error
        if last or _due(step, config.checkpoint.every_steps):
            path = save_state(trainer, step)
            if reporter:
                reporter.saved(path)
        if result.stop:
            get_logger().warning("stopped by a signal after step %d; the state is saved", step)
            return False
    return True


def _no_updates(result: StepResult, step: int) -> str:
    """Why the last MAX_SKIPPED steps, up to `step`, changed nothing, and what to do."""
    why, way_out = "loss or gradients were not finite", "Resume from an earlier checkpoint with a lower lr.peak"
    if result.valid_tokens == 0:
        why, way_out = "no token was trained on", "Look at the labels: data.mask_eod_loss and data.train"
    return (
        f"{why} in the last {MAX_SKIPPED} steps, up to step {step}; the weights are those of step "
        f"{step - MAX_SKIPPED}. {way_out}"
    )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
