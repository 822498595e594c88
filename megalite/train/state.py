"""What a run needs to go on after a stop: the state's pieces, and the few numbers that are not tensors.

Nothing else exists: batches are a function of the step, random numbers of (seed, step, index), the learning rate of
the step.
"""

from pathlib import Path
from typing import Any

from megalite.checkpoint.load import load
from megalite.checkpoint.manifest import CheckpointError
from megalite.checkpoint.save import save
from megalite.config.schema import Config, Lr
from megalite.optim.lr import check_resume
from megalite.optim.norm import counted
from megalite.train.build import Trainer


def checkpoint_root(config: Config) -> Path:
    """Where the run's checkpoints are."""
    return Path(config.run.dir) / "checkpoints"


def save_state(trainer: Trainer, step: int) -> Path:
    """Save a checkpoint after `step`; every rank calls it. See checkpoint.save for errors."""
    config = trainer.config
    samples = step * config.batch.global_batch_size
    meta = {
        "config": config.model_dump(mode="json"),
        "updates": trainer.optimizer.step_count,
        "samples": samples,
        "tokens": samples * config.batch.seq_len,
        "seed": config.run.seed,
        "data_seed": config.data.seed,
    }
    return save(
        checkpoint_root(config),
        step,
        trainer.optimizer.pieces(counted),
        group=trainer.mesh.world,
        owner=trainer.zero.owns_replica,
        meta=meta,
        keep_last=config.checkpoint.keep_last,
    )


def load_state(trainer: Trainer, directory: Path) -> int:
    """Fill all shards from a checkpoint of any layout and return the step it was saved after.

    Raises:
        CheckpointError: the checkpoint is broken or is of another model, optimizer or batch size.
    """
    meta = load(directory, trainer.optimizer.pieces(), group=trainer.mesh.world)
    config = trainer.config
    _check_cursor(config, meta, directory)
    step = int(meta["samples"]) // config.batch.global_batch_size
    saved = meta["config"]
    check_resume(Lr(**saved["lr"]), config.lr, step=step, saved_steps=saved["run"]["steps"], steps=config.run.steps)
    trainer.optimizer.step_count = int(meta["updates"])
    trainer.zero.updated()
    return step


def _check_cursor(config: Config, meta: dict[str, Any], directory: Path) -> None:
    """The data cursor counts samples: it must be a whole number of this run's steps, of the same length and order."""
    batch, saved = config.batch, meta["config"]["batch"]
    if int(meta["samples"]) % batch.global_batch_size:
        raise CheckpointError(
            f"{directory} was saved after {meta['samples']} samples, which batch.global_batch_size="
            f"{batch.global_batch_size} does not divide; use a divisor, e.g. {saved['global_batch_size']}"
        )
    if saved["seq_len"] != batch.seq_len:
        raise CheckpointError(
            f"batch.seq_len={batch.seq_len}, but {directory} was trained with {saved['seq_len']}, which fixes where "
            f"its data stopped; use batch.seq_len={saved['seq_len']}, or checkpoint.resume=none with another run.dir"
        )
