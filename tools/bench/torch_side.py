"""torch's own pieces as a contestant: DDP, FSDP2, DTensor tp + sp, torch.distributed.pipelining, and all at once.

Each is set up for speed as its documentation says: AdamW fused, gradients as bucket views, one gather in front of
attention and of the MLP, loss over the sharded vocabulary, and with pipelining parameters stay gathered through the step.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from bench.data import share
from bench.rows import Row, Work
from bench.torch_model import Stage, loss_of, param_groups

SCHEDULES = {"1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B, "zbv": ScheduleZBVZeroBubble}


class Trainer:
    """One rank."""

    def __init__(self, row: Row, work: Work, variant: str, weights: str):
        self.row, self.work = row, work
        self.mesh = None
        if row.world_size > 1:
            self.mesh = init_device_mesh("cpu", (row.pp, row.dp, row.tp), mesh_dim_names=("pp", "dp", "tp"))
        self.indices = stage_indices(row, self.at("pp"))
        self.modules = [self.make_stage(index, variant, weights) for index in self.indices]
        self.optimizer = make_optimizer(self.modules, work, sharded=variant == "ddp_zero")
        self.schedule = self.make_schedule() if row.pp > 1 else None

    def at(self, axis: str) -> int:
        """This rank's index on an axis."""
        return self.mesh.get_local_rank(axis) if self.mesh is not None else 0

    def make_stage(self, index: int, variant: str, weights: str) -> nn.Module:
        """One stage with its weights, made parallel over tp, then over dp."""
        module = Stage(self.work, index, self.row.pp * self.row.virtual)
        module.load(weights)
        if self.row.tp > 1:
            tensor_parallel(module, self.mesh["tp"])
        if variant == "fsdp":
            reshard = self.row.zero == 3 and self.row.reshard_after == "forward"
            for block in module.layers.values():
                fully_shard(block, mesh=self.mesh["dp"], reshard_after_forward=reshard)
            return fully_shard(module, mesh=self.mesh["dp"], reshard_after_forward=reshard)
        if variant in ("ddp", "ddp_zero"):
            return nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True, broadcast_buffers=False)
        return module

    def make_schedule(self):
        """torch's schedule over this rank's stages."""
        num_stages = self.row.pp * self.row.virtual
        stages = [
            PipelineStage(module, index, num_stages, torch.device("cpu"), group=self.mesh.get_group("pp"))
            for index, module in zip(self.indices, self.modules, strict=True)
        ]
        num = self.work.global_batch_size // (self.row.dp * self.row.micro_batch_size)
        single = self.row.schedule == "1f1b"
        return SCHEDULES[self.row.schedule](stages[0] if single else stages, num, loss_fn=loss_of)

    def step(self, tokens: Tensor, labels: Tensor, number: int) -> float:
        """Train on a global batch; returns its mean loss."""
        tokens, labels = (share(whole, self.at("dp"), self.row.dp) for whole in (tokens, labels))
        self.optimizer.zero_grad()
        with loss_parallel() if self.row.tp > 1 else nullcontext():
            loss = self.pipelined(tokens, labels) if self.schedule else self.whole(tokens, labels)
        self.optimizer.step()
        return self.mean(loss)

    def whole(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Forward and backward without a pipeline."""
        loss = loss_of(self.modules[0](tokens), labels)
        loss.backward()
        return loss.detach()

    def pipelined(self, tokens: Tensor, labels: Tensor) -> Tensor | None:
        """Forward and backward of all microbatches; the loss where the last stage is."""
        last = self.row.pp * self.row.virtual - 1 in self.indices
        losses: list[Tensor] = []
        inputs = (tokens,) if 0 in self.indices else ()
        self.schedule.step(*inputs, **({"target": labels, "losses": losses} if last else {}))
        return torch.stack([local(loss.detach()) for loss in losses]).mean() if last else None

    def mean(self, loss: Tensor | None) -> float:
        """The mean over dp, known on every rank, as a training loop logs it."""
        if self.row.world_size == 1:
            return loss.item()
        value = torch.zeros(()) if loss is None else local(loss) / (self.row.dp * self.row.tp)
        dist.all_reduce(value)
        return value.item()

    def sent_bytes(self) -> None:
        """torch keeps no account."""
        return None


def stage_indices(row: Row, rank: int) -> list[int]:
    """The stages of a pp rank: down the ranks again and again, or down and back up."""
    if row.schedule == "zbv":
        return [rank, 2 * row.pp - 1 - rank]
    return [rank + row.pp * chunk for chunk in range(row.virtual)]


def local(loss: Tensor) -> Tensor:
    """A plain tensor of a loss that may be a DTensor."""
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def tensor_parallel(module: Stage, mesh: DeviceMesh) -> None:
    """Shard a stage over tp, with activations sharded along the sequence between its linear layers."""
    rows = Shard(1)
    plan: dict = {}
    if module.embedding is not None:
        plan["embedding.word"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=rows)
    if module.head is not None:
        plan["final_norm"] = SequenceParallel()
        plan["head"] = ColwiseParallel(input_layouts=rows, output_layouts=Shard(-1), use_local_output=False)
    for number in module.layers:
        block = f"layers.{number}"
        for part in ("attention", "mlp"):
            plan[f"{block}.{part}_norm"] = SequenceParallel()
            plan[f"{block}.{part}"] = PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(Replicate(),))
        for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"):
            plan[f"{block}.{name}"] = ColwiseParallel()
        for name in ("attention.out", "mlp.down"):
            plan[f"{block}.{name}"] = RowwiseParallel(output_layouts=rows)
    parallelize_module(module, mesh, plan)


def make_optimizer(modules: list[nn.Module], work: Work, *, sharded: bool) -> torch.optim.Optimizer:
    """Fused AdamW, its state sharded over all ranks if wanted."""
    groups = param_groups(modules, work)
    settings = {"lr": work.lr, "betas": work.betas, "eps": work.eps, "fused": True}
    if sharded:
        return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, parameters_as_bucket_view=True, **settings)
    return torch.optim.AdamW(groups, **settings)
