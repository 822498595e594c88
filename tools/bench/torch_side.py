"""torch's own pieces as a contestant: DDP, FSDP2, DTensor tp + sp, torch.distributed.pipelining, and all at once.

Each is set up for speed as its documentation says: AdamW fused, gradients as bucket views, one gather in front of
attention and of the MLP, loss over the sharded vocabulary, and with pipelining parameters that stay gathered through
the step. A rank imports only the pieces that its row uses, since they cost memory.
"""

import importlib
from contextlib import nullcontext
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.data import share
from bench.rows import Row, Work
from bench.torch_model import Stage, loss_of, param_groups

FSDP = ("fsdp", "fsdp_async")


class Trainer:
    """One rank."""

    def __init__(self, row: Row, work: Work, variant: str, weights: str):
        self.row, self.work, self.variant = row, work, variant
        self.mesh = self.tp = self.schedule = None
        if row.tp > 1 or row.pp > 1 or variant in FSDP:
            mesh_module = importlib.import_module("torch.distributed.device_mesh")
            sizes = (row.pp, row.dp, row.tp)
            self.mesh = mesh_module.init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp"))
        if row.tp > 1:
            self.tp = importlib.import_module("bench.torch_tp")
        self.dp_rank = self.mesh.get_local_rank("dp") if self.mesh is not None else dist.get_rank() if row.dp > 1 else 0
        self.indices = stage_indices(row, self.mesh.get_local_rank("pp") if row.pp > 1 else 0)
        self.modules = [self.make_stage(index, weights) for index in self.indices]
        self.optimizer = make_optimizer(self.modules, work, sharded=variant == "ddp_zero")
        if row.pp > 1:
            pipeline = importlib.import_module("bench.torch_pp")
            num = work.global_batch_size // (row.dp * row.micro_batch_size)
            group = self.mesh.get_group("pp")
            self.schedule = pipeline.make_schedule(row, self.indices, self.modules, group=group, num_microbatches=num)

    def make_stage(self, index: int, weights: str) -> nn.Module:
        """One stage with its weights, made parallel over tp, then over dp."""
        module = Stage(self.work, index, self.row.pp * self.row.virtual)
        module.load(weights)
        if self.tp:
            self.tp.tensor_parallel(module, self.mesh["tp"])
        if self.variant in FSDP:
            return self.fully_sharded(module)
        if self.variant in ("ddp", "ddp_zero"):
            return nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True, broadcast_buffers=False)
        return module

    def fully_sharded(self, module: nn.Module) -> nn.Module:
        """FSDP2 on blocks and on the whole; with `fsdp_async` also its private switch for gathers under compute."""
        fully_shard = importlib.import_module("torch.distributed.fsdp").fully_shard
        reshard = self.row.zero == 3 and self.row.reshard_after == "forward"
        blocks = list(module.layers.values())
        for block in blocks:
            fully_shard(block, mesh=self.mesh["dp"], reshard_after_forward=reshard)
        fully_shard(module, mesh=self.mesh["dp"], reshard_after_forward=reshard)
        if self.variant == "fsdp_async":
            module._set_unshard_async_op(True)
            module.set_modules_to_forward_prefetch(blocks[:1])
            module.set_modules_to_backward_prefetch(blocks[-1:])
            for block, following in pairwise(blocks):
                block.set_modules_to_forward_prefetch([following])
                following.set_modules_to_backward_prefetch([block])
        return module

    def step(self, tokens: Tensor, labels: Tensor, number: int) -> float:
        """Train on a global batch; returns its mean loss."""
        tokens, labels = (share(whole, self.dp_rank, self.row.dp) for whole in (tokens, labels))
        self.optimizer.zero_grad()
        with self.tp.loss_parallel() if self.tp else nullcontext():
            loss = self.pipelined(tokens, labels) if self.schedule else self.whole(tokens, labels)
        self.optimizer.step()
        return self.mean(loss)

    def whole(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Forward and backward without a pipeline."""
        loss = loss_of(self.modules[0](tokens), labels)
        loss.backward()
        return self.local(loss.detach())

    def pipelined(self, tokens: Tensor, labels: Tensor) -> Tensor | None:
        """Forward and backward of all microbatches; the loss where the last stage is."""
        last = self.row.pp * self.row.virtual - 1 in self.indices
        losses: list[Tensor] = []
        inputs = (tokens,) if 0 in self.indices else ()
        self.schedule.step(*inputs, **({"target": labels, "losses": losses} if last else {}))
        return torch.stack([self.local(loss.detach()) for loss in losses]).mean() if last else None

    def local(self, loss: Tensor) -> Tensor:
        """A plain tensor of a loss that may be a DTensor."""
        return self.tp.local(loss) if self.tp else loss

    def mean(self, loss: Tensor | None) -> float:
        """The mean over dp, known on every rank, as a training loop logs it."""
        if self.row.world_size == 1:
            return loss.item()
        value = torch.zeros(()) if loss is None else loss / (self.row.dp * self.row.tp)
        dist.all_reduce(value)
        return value.item()

    def finish(self) -> None:
        """Nothing runs on after a step."""

    def traffic(self) -> None:
        """torch keeps no account."""
        return None


def stage_indices(row: Row, rank: int) -> list[int]:
    """The stages of a pp rank: down the ranks again and again, or down and back up."""
    if row.schedule == "zbv":
        return [rank, 2 * row.pp - 1 - rank]
    return [rank + row.pp * chunk for chunk in range(row.virtual)]


def make_optimizer(modules: list[nn.Module], work: Work, *, sharded: bool) -> torch.optim.Optimizer:
    """Fused AdamW, its state sharded over all ranks if wanted."""
    groups = param_groups(modules, work)
    settings = {"lr": work.lr, "betas": work.betas, "eps": work.eps, "fused": True}
    if sharded:
        sharder = importlib.import_module("torch.distributed.optim").ZeroRedundancyOptimizer
        return sharder(groups, torch.optim.AdamW, parameters_as_bucket_view=True, **settings)
    return torch.optim.AdamW(groups, **settings)
