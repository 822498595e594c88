"""Batches for verification: a pure function of the config and the step, so ranks make them without sending.

Masks are uneven on purpose: the first sequence of a global batch is trained on at every position, the last at none,
so a mean of means, or a wrong token count, changes the loss.
"""

import torch
from torch import Tensor

from megalite.batch import IGNORE, Microbatch
from megalite.config.schema import Config


def global_batch(config: Config, step: int) -> dict[str, Tensor]:
    """`tokens` and `labels` (B, S) of one step, and `documents` with data.document_mask."""
    generator = torch.Generator().manual_seed(1000 + step)
    num, seq_len = config.batch.global_batch_size, config.batch.seq_len
    stream = torch.randint(config.model.vocab_size, (num, seq_len + 1), generator=generator)
    batch = {"tokens": stream[:, :-1].contiguous(), "labels": stream[:, 1:].clone()}
    for sample in range(num):
        batch["labels"][sample, seq_len - seq_len * sample // max(num - 1, 1) :] = IGNORE
    if config.data.document_mask:
        ends = torch.rand(num, seq_len, generator=generator) < 0.2
        batch["documents"] = ends.cumsum(1).to(torch.int32)
    return batch


def own_microbatches(config: Config, dp_rank: int, step: int) -> list[Microbatch]:
    """The share of a dp rank of the step's global batch."""
    batch, size = global_batch(config, step), config.batch.micro_batch_size
    first = dp_rank * config.batch.num_microbatches * size
    return [
        Microbatch(
            **{name: value[start : start + size] for name, value in batch.items()}, sample_start=start, step=step
        )
        for start in range(first, first + config.batch.num_microbatches * size, size)
    ]
