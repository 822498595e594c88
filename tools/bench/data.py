"""Random tokens with Zipf frequencies: the batch of a step is a function of the step, the same for all contestants."""

import torch
from torch import Tensor

from bench.rows import Work


def batch(work: Work, step: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels (the next tokens) of the whole global batch, (B, S) int64 each."""
    generator = torch.Generator().manual_seed(1_000_003 * work.seed + step)
    frequency = 1.0 / torch.arange(1, work.vocab_size + 1)
    num = work.global_batch_size * (work.seq_len + 1)
    drawn = torch.multinomial(frequency, num, replacement=True, generator=generator)
    drawn = drawn.view(work.global_batch_size, work.seq_len + 1)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def share(whole: Tensor, rank: int, size: int) -> Tensor:
    """The sequences of one data parallel rank."""
    per_rank = len(whole) // size
    return whole[rank * per_rank : (rank + 1) * per_rank]
