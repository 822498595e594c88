"""Held-out loss: the same pipeline, forward only, with dropout off."""

from collections.abc import Iterable

from megalite.batch import Microbatch
from megalite.train.build import Trainer
from megalite.train.step import count_valid_tokens, own_loss, sum_over_ranks


def evaluate(trainer: Trainer, batches: Iterable[list[Microbatch]]) -> float:
    """Mean loss per valid token over the given global batches; the same on every rank.

    Weights, gradients and optimizer state are as before.
    """
    _set_mode(trainer, train=False)
    loss_sum, valid_tokens = 0.0, 0
    for group in batches:
        losses = trainer.eval_runtime.run(group, train=False)
        loss_sum += sum_over_ranks(trainer, [own_loss(trainer, losses)])[0]
        valid_tokens += count_valid_tokens(trainer, group)
    _set_mode(trainer, train=True)
    return loss_sum / max(valid_tokens, 1)


def _set_mode(trainer: Trainer, *, train: bool) -> None:
    for stage in trainer.stages:
        for link in stage.links:
            link.train(train)
