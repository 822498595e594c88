"""One optimizer step, and the one place where losses are divided: by the tokens of the whole global batch.

Tokens that are trained on are counted first, over all dp ranks; every token's loss then starts backward with gradient
1/count. So accumulation, data parallelism and uneven label masks give the one exact mean, and gradients over dp are
summed.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.batch import IGNORE, Microbatch
from megalite.comm.collectives import all_reduce
from megalite.optim.norm import clip_factor, local_square_sum
from megalite.train.build import Trainer


@dataclass(frozen=True)
class StepResult:
    """What one step did; the same on every rank."""

    loss: float
    grad_norm: float
    """Before clipping."""
    valid_tokens: int
    """Tokens of the global batch that were trained on."""
    skipped: bool
    """No rank changed its weights: the loss or the norm was not finite, or the batch trains no token at all."""
    stop: bool = False
    """Some rank was asked to stop after this step."""


def train_step(trainer: Trainer, batches: list[Microbatch], *, lr: float, stop: bool = False) -> StepResult:
    """Forward, backward, reduce, clip and update on one global batch.

    Args:
        stop: this rank wants to stop; all ranks learn of it in the result.

    Communication: 8 bytes over dp for the token count, 24 over all ranks for loss, norm and stop, and what model,
    pipeline and ZeRO need.
    """
    result = compute_grads(trainer, batches, stop=stop)
    if not result.skipped:
        clip = clip_factor(result.grad_norm, trainer.config.optimizer.clip_norm)
        spans = trainer.mesh.ledger.spans
        with spans.span("optimizer", "update") if spans else nullcontext():
            trainer.optimizer.update(lr, scale=clip)  # fused: the shards keep the unclipped gradient
            trainer.zero.updated()
    return result


def compute_grads(trainer: Trainer, batches: list[Microbatch], *, stop: bool = False) -> StepResult:
    """The step up to the update: afterwards every shard holds its part of the unclipped gradient."""
    trainer.runtime.begin()
    valid_tokens = count_valid_tokens(trainer, batches)
    trainer.zero.begin_step()
    losses = trainer.runtime.run(batches, loss_grad=1.0 / max(valid_tokens, 1))
    trainer.zero.finish_grads()
    flag = torch.tensor(float(stop), dtype=torch.float64, device=trainer.mesh.device)
    own_squares = local_square_sum(trainer.zero, impl=trainer.optimizer.norm_kernel.module)
    own = [own_loss(trainer, losses), own_squares, flag]
    loss_sum, square_sum, stops = sum_over_ranks(trainer, own)
    loss, norm = loss_sum / max(valid_tokens, 1), math.sqrt(square_sum)
    # without any gradient an update would still decay the weights and move them by momentum
    skipped = valid_tokens == 0 or not (math.isfinite(loss) and math.isfinite(norm))
    return StepResult(loss, norm, valid_tokens, skipped, stop=stops > 0)


def count_valid_tokens(trainer: Trainer, batches: list[Microbatch]) -> int:
    """Labels that are not IGNORE, over the global batch."""
    count = torch.stack([(batch.labels != IGNORE).sum() for batch in batches]).sum()
    all_reduce(count, trainer.mesh.dp, site="step.tokens")
    return int(count)


def own_loss(trainer: Trainer, losses: list[Tensor]) -> Tensor:
    """This rank's share of the loss sum, fp64: the last stage's, counted on one of its tp ranks."""
    if not losses or trainer.mesh.tp.rank != 0:
        return torch.zeros((), dtype=torch.float64, device=trainer.mesh.device)
    return torch.stack(losses).sum(dtype=torch.float64)


def sum_over_ranks(trainer: Trainer, values: list[Tensor]) -> list[float]:
    """Sum fp64 scalars over all ranks."""
    packed = torch.stack(values)
    all_reduce(packed, trainer.mesh.world, site="step.scalars")
    return packed.tolist()
