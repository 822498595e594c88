"""DeepSpeed's ZeRO stages as a contestant, where DeepSpeed is installed; clipping off (its default is 1.0).

At its first start DeepSpeed compiles its shared memory op, which takes a minute or two; a build that was killed leaves
an empty `lock` under ~/.cache/torch_extensions that makes every later start wait, and is to be deleted by hand.
"""

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

from bench.data import share
from bench.rows import Row, Work
from bench.torch_model import Stage, loss_of, param_groups


class Trainer:
    """One rank of a plain data parallel row."""

    def __init__(self, row: Row, work: Work, variant: str, weights: str):
        assert row.dp == row.world_size, row
        self.row = row
        module = Stage(work, 0, 1)
        module.load(weights)
        groups = param_groups([module], work)
        optimizer = torch.optim.AdamW(groups, lr=work.lr, betas=work.betas, eps=work.eps, fused=True)
        settings = {
            "train_micro_batch_size_per_gpu": row.micro_batch_size,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": row.zero},
            "steps_per_print": 10**9,
        }
        self.engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)

    def step(self, tokens: Tensor, labels: Tensor, number: int) -> float:
        """Train on a global batch; returns its mean loss."""
        tokens, labels = (share(whole, dist.get_rank(), self.row.dp) for whole in (tokens, labels))
        loss = loss_of(self.engine(tokens), labels)
        self.engine.backward(loss)
        self.engine.step()
        value = loss.detach() / self.row.dp
        dist.all_reduce(value)
        return value.item()

    def finish(self) -> None:
        """Nothing runs on after a step."""

    def traffic(self) -> None:
        """It keeps no account."""
        return None
