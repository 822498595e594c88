"""What every module of the model is built from: the model's numbers, this rank's place in tp, kernels and overlap."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from megalite.config.recompute import Recompute, recompute_ops
from megalite.config.schema import Config, Model
from megalite.kernels.registry import Selection, select
from megalite.mesh import Mesh
from megalite.observe.log import get_logger
from megalite.parallel.tp.overlap.choose import NO_CHOICES, Choices, Linear, choose, transport_of
from megalite.parallel.tp.overlap.symm import open_symm
from megalite.parallel.tp.rows import TensorParallel

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class ModelContext:
    """Shared by all modules of one rank; frozen."""

    model: Model
    tp: TensorParallel
    dtype: torch.dtype
    padded_vocab: int
    recompute: Recompute
    seed: int
    kernels: Selection
    overlap: Choices = NO_CHOICES

    def recompute_ops(self, layer: int) -> frozenset[str]:
        """What block `layer` computes again in backward: see config/recompute.py."""
        return recompute_ops(self.recompute, layer)

    def linear(self, site: str) -> dict[str, Any]:
        """What the tp linear at `site` is made with, next to its parameters."""
        return {
            "tp": self.tp,
            "dtype": self.dtype,
            "site": site,
            "wgrad": self.kernels["wgrad"],
            "overlap": self.overlap[site],
        }

    @property
    def num_heads(self) -> int:
        """Query heads of this rank."""
        return self.model.num_heads // self.tp.size

    @property
    def kv_replicas(self) -> int:
        """Neighbouring ranks that hold the same kv heads."""
        return max(1, self.tp.size // self.model.num_kv_heads)

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads of this rank."""
        return max(1, self.model.num_kv_heads // self.tp.size)

    @property
    def vocab_padding(self) -> int:
        """Rows of this rank's vocabulary slice that belong to no token."""
        rows = self.padded_vocab // self.tp.size
        return rows - max(0, min(rows, self.model.vocab_size - self.tp.rank * rows))

    @property
    def residual_std(self) -> float:
        """Std of the projections that write into the residual stream (GPT-2's rule)."""
        return self.model.init_std / (2 * self.model.num_layers) ** 0.5


def model_context(config: Config, mesh: Mesh) -> ModelContext:
    """The context of this rank; logs which kernels and which overlap it uses.

    Raises:
        ValueError: a choice of config.kernels or config.overlap that can't be met on the mesh's device.

    Communication: with overlap.backend=symm, makes the heap of the tp group.
    """
    dtype = DTYPES[config.precision.compute]
    kernels = select(config.kernels, mesh.device, dtype)
    get_logger().info("kernels:\n  %s", kernels.table().replace("\n", "\n  "))
    context = ModelContext(
        model=config.model,
        tp=TensorParallel(mesh.tp, config.sequence_parallel, begins=config.batch_parts > 1),
        dtype=dtype,
        padded_vocab=config.padded_vocab,
        recompute=config.recompute,
        seed=config.run.seed,
        kernels=kernels,
    )
    return replace(context, overlap=_overlap(config, mesh, context))


def _overlap(config: Config, mesh: Mesh, context: ModelContext) -> Choices:
    rows = config.batch.micro_batch_size * config.batch.seq_len
    if config.batch_parts > 1:
        choices = Choices(batch_parts=config.batch_parts)
    else:
        choices = choose(
            config.overlap,
            block_linears(context),
            rows=rows,
            dtype=context.dtype,
            tp=context.tp,
            transport=transport_of(context.tp, mesh.device),
            symm=lambda: open_symm(mesh.tp, device=mesh.device, dtype=context.dtype, timeout_s=config.run.timeout_s),
        )
    if context.tp.size > 1:
        get_logger().info("overlap of %d rows:\n  %s", rows, choices.table().replace("\n", "\n  "))
    return choices


def block_linears(context: ModelContext) -> list[Linear]:
    """The tp linears of a block, with this rank's sizes."""
    model, heads = context.model, context.num_heads + 2 * context.num_kv_heads
    wide, num_wide = ("mlp.gate_up", 2) if model.activation == "swiglu" else ("mlp.up", 1)
    ffn_size = model.ffn_size // context.tp.size
    return [
        Linear("attention.qkv", "column", model.hidden_size, heads * model.head_dim),
        Linear("attention.out", "row", model.hidden_size, context.num_heads * model.head_dim),
        Linear(wide, "column", model.hidden_size, num_wide * ffn_size),
        Linear("mlp.down", "row", model.hidden_size, ffn_size),
    ]
