"""What verification does on one rank: a few steps, and a record of everything that another layout must reproduce.

Whole tensors are gathered by logical name, so records of all layouts have the same form. The same code runs the
one-device reference.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megalite.config.schema import Config
from megalite.mesh import Mesh
from megalite.optim.norm import counted
from megalite.parallel.spec import Piece
from megalite.train.build import Trainer, build
from megalite.train.evaluate import evaluate
from megalite.train.logical import full_grads, full_params
from megalite.train.replicas import ReplicaError, check_replicas
from megalite.train.step import StepResult, train_step
from megalite.verify.data import own_microbatches

Say = Callable[[str], None]
Tensors = dict[str, Tensor]


@dataclass
class StepRecord:
    """One step: scalars as every rank got them, gradients before clipping, weights after the update."""

    scalars: dict[str, float]
    grads: Tensors
    weights: Tensors


@dataclass
class Record:
    """A run: the weights before the first step, the steps, and the held-out loss after them."""

    initial: Tensors = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    eval_loss: float = 0.0

    @property
    def all_scalars(self) -> list[dict[str, float]]:
        """What must be the same bits on all ranks."""
        return [*(step.scalars for step in self.steps), {"eval_loss": self.eval_loss}]


@dataclass
class RankReport:
    """What one rank hands back. `record` comes from rank 0 only; `faults` are what this rank itself saw."""

    rank: int
    place: str
    scalars: list[dict[str, float]]
    holdings: list[tuple[str, tuple[int, ...], tuple[int, ...], int, int]]
    """Which elements this rank's gradients come from: (name, start, shape, offset, length) as in spec.Piece."""
    faults: list[str]
    record: Record | None = None


def run_rank(config: Config, mesh: Mesh, *, say: Say = lambda text: None, poison: bool = True) -> RankReport:
    """Run the config's steps on this rank and report.

    Args:
        say:    told before each part, for progress.
        poison: end with a step whose weights hold a NaN, which every rank must skip.
    """
    say("build")
    trainer = build(config, mesh)
    record = run_steps(trainer, say)
    say("copies")
    faults = different_copies(trainer)
    if poison:
        say("non-finite step")
        faults += poisoned_step(trainer)
    at = mesh.sizes.coordinates(mesh.rank)
    return RankReport(
        rank=mesh.rank,
        place=", ".join(f"{axis} {index}" for axis, index in at.items() if getattr(mesh.sizes, axis) > 1),
        scalars=record.all_scalars,
        holdings=[_holding(p) for p in trainer.optimizer.grad_pieces(counted) if trainer.zero.owns_replica],
        faults=faults,
        record=record if mesh.rank == 0 else None,
    )


def run_steps(trainer: Trainer, say: Say) -> Record:
    """The record of config.run.steps steps and one evaluation."""
    config = trainer.config
    record = Record(initial=full_params(trainer))
    for step in range(config.run.steps):
        say(f"step {step + 1}")
        done = train_step(trainer, own_microbatches(config, trainer.mesh.dp.rank, step), lr=config.lr.peak)
        record.steps.append(StepRecord(scalars(done), full_grads(trainer), full_params(trainer)))
    say("evaluation")
    record.eval_loss = evaluate(trainer, [own_microbatches(config, trainer.mesh.dp.rank, config.run.steps)])
    return record


def scalars(done: StepResult) -> dict[str, float]:
    """The numbers of a step that must agree."""
    return {"loss": done.loss, "grad_norm": done.grad_norm, "valid_tokens": float(done.valid_tokens)}


def different_copies(trainer: Trainer) -> list[str]:
    """What `check_replicas` says against the copies over tp, dp and pp."""
    try:
        check_replicas(trainer, trainer.config.run.steps)
    except ReplicaError as error:
        return [str(error)]
    return []


def poisoned_step(trainer: Trainer) -> list[str]:
    """Plant a NaN into a weight of rank 0 and take a step: no rank may update. The trainer is useless afterwards."""
    config, units = trainer.config, list(trainer.zero.units.values())
    if trainer.mesh.rank == 0:
        unit = [unit for unit in units if trainer.zero.runs(unit)][-1]  # not the embedding: its rows may be unused
        unit.main[trainer.zero.runs(unit)[0].shard_offset] = torch.nan
    trainer.zero.updated()
    before = [unit.main.clone() for unit in units]
    step = config.run.steps
    done = train_step(trainer, own_microbatches(config, trainer.mesh.dp.rank, step), lr=config.lr.peak)
    changed = [unit.name for unit, old in zip(units, before, strict=True) if not _same_bits(unit.main, old)]
    if done.skipped and not changed and trainer.optimizer.step_count == step:
        return []
    return [
        f"a step with a NaN on rank 0 was not skipped (skipped: {done.skipped}; updates counted: "
        f"{trainer.optimizer.step_count}, expected {step}; changed units: {', '.join(changed) or 'none'})"
    ]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _holding(piece: Piece) -> tuple[str, tuple[int, ...], tuple[int, ...], int, int]:
    part = piece.part
    return part.name, part.start, part.shape, piece.offset, piece.data.numel()
