"""Causal self-attention with grouped kv heads, split over tp by heads.

q, k and v are one column-parallel GEMM behind one gather. Rank r holds query heads [r*N/tp, (r+1)*N/tp) and the kv
heads these read; with fewer kv heads than ranks, neighbours hold the same kv head and sum its gradient over the `kv`
group.
Reference: Vaswani et al., arXiv:1706.03762; Ainslie et al., arXiv:2305.13245 (grouped heads).
"""

import torch
from torch import Tensor, nn

from megalite.batch import Microbatch
from megalite.kernels.attention import attention
from megalite.kernels.attention.reference import document_mask
from megalite.kernels.rope import split_heads
from megalite.model.context import ModelContext
from megalite.model.dropout import attention_dropout
from megalite.model.positions import RopeTables
from megalite.model.recompute import replay
from megalite.parallel.spec import ParamSpec, Part
from megalite.parallel.tp.begun import Steps
from megalite.parallel.tp.linear import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.tp.specs import replicated_reduce, slab, split, whole


class Attention(nn.Module):
    """q, k, v projections, rotary embedding, softmax(q k^T / sqrt(H)) v, output projection."""

    def __init__(self, layer: int, context: ModelContext, rope_tables: RopeTables | None):
        super().__init__()
        self.context = context
        self.name = f"layers.{layer}.attention"
        self.replayed = "attention" in context.recompute_ops(layer)
        self.rope_tables = rope_tables
        self.heads = (context.num_heads, context.num_kv_heads, context.num_kv_heads)
        self.kernels = {"impl": context.kernels["attention"], "rope": context.kernels["rope"]}
        self.qkv = make_qkv(self.name, context)
        self.out = make_out(self.name, context)

    def steps(self, x: Tensor, batch: Microbatch) -> Steps:
        """(rows, D) -> (rows, D), rows being this rank's."""
        num_samples, seq_len = batch.tokens.shape
        finish = self.qkv.begin(x)
        yield
        qkv = finish().view(num_samples, seq_len, sum(self.heads), self.context.model.head_dim)
        replayed = self.replayed and qkv.requires_grad
        mixed = replay(self.core, qkv, arguments=(batch,)) if replayed else self.core(qkv, batch)
        finish = self.out.begin(mixed)
        yield
        return finish()

    def core(self, qkv: Tensor, batch: Microbatch) -> Tensor:
        """Attention of each sequence by itself: (B, S, heads, H) -> (M, N/tp * H)."""
        angles = None if self.rope_tables is None else self.rope_tables.get(qkv.shape[1], qkv.device)
        if self.training and self.context.model.attention_dropout > 0.0:
            q, k, v = split_heads(qkv, heads=self.heads, angles=angles, impl=self.kernels["rope"])
            return self._explicit(q, k, v, batch).transpose(1, 2).reshape(batch.rows, -1)
        return attention(qkv, heads=self.heads, angles=angles, documents=batch.documents, **self.kernels)

    def _explicit(self, q: Tensor, k: Tensor, v: Tensor, batch: Microbatch) -> Tensor:
        """With dropout on the weights, which are held in memory: B*N*S*S. (B, heads, S, H) each."""
        repeats = self.heads[0] // self.heads[1]
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        seq_len = q.shape[2]
        if batch.documents is None:
            mask = torch.ones(seq_len, seq_len, dtype=torch.bool, device=q.device).tril_()
        else:
            mask = document_mask(batch.documents)
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        wide = torch.promote_types(q.dtype, torch.float32)
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=wide).to(q.dtype)
        return attention_dropout(weights, self.name, context=self.context, batch=batch) @ v


def make_qkv(name: str, context: ModelContext) -> ColumnParallelLinear:
    """The fused projection; local rows are this rank's q heads, then its k heads, then its v heads."""
    model = context.model
    reduce = "kv" if context.kv_replicas > 1 else None
    weight = ParamSpec(
        qkv_parts(name, "weight", (model.hidden_size,), context), "linear", init_std=model.init_std, tp_reduce=reduce
    )
    bias = (
        ParamSpec(qkv_parts(name, "bias", (), context), "bias", init="zeros", tp_reduce=reduce) if model.bias else None
    )
    return ColumnParallelLinear(weight, bias, **context.linear("attention.qkv"))


def qkv_parts(name: str, attribute: str, columns: tuple[int, ...], context: ModelContext) -> tuple[Part, Part, Part]:
    """The boxes of q, k and v that this rank holds."""
    model, size = context.model, context.model.head_dim
    replicas, rank = context.kv_replicas, context.tp.rank
    q = split(f"{name}.q.{attribute}", (model.num_heads * size, *columns), dim=0, tp=context.tp)
    rows = context.num_kv_heads * size
    k, v = (
        slab(
            f"{name}.{which}.{attribute}",
            (model.num_kv_heads * size, *columns),
            dim=0,
            start=rank // replicas * rows,
            size=rows,
            num_replicas=replicas,
            replica=rank % replicas,
        )
        for which in ("k", "v")
    )
    return q, k, v


def make_out(name: str, context: ModelContext) -> RowParallelLinear:
    """The output projection into the residual stream."""
    model = context.model
    part = split(f"{name}.out.weight", (model.hidden_size, model.num_heads * model.head_dim), dim=1, tp=context.tp)
    weight = ParamSpec((part,), "linear", init_std=context.residual_std)
    return RowParallelLinear(weight, residual_bias(f"{name}.out", context), **context.linear("attention.out"))


def residual_bias(name: str, context: ModelContext) -> ParamSpec | None:
    """Spec of the replicated bias of a row-parallel layer, or None."""
    if not context.model.bias:
        return None
    part = whole(f"{name}.bias", (context.model.hidden_size,), tp=context.tp)
    return ParamSpec((part,), "bias", init="zeros", tp_reduce=replicated_reduce(context.tp))
