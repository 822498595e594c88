"""FLOPs per token, counted in this one place, from plain numbers.

Convention: a multiply-add is 2 FLOPs; forward and backward are 3 forwards: 6 per matmul weight, and 12 * L * N * H * S
per token for attention scores and values over the full square (no causal discount; PaLM, arXiv:2204.02311, appendix B).
The head counts, with the logical vocabulary (padding is not work); the embedding look-up does not.
Recompute is not part of the model's FLOPs (MFU) and is added for the hardware's (HFU).
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """The sizes that decide a model's FLOPs. `gated`: SwiGLU, three mlp matrices in place of two."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    gated: bool


@dataclass(frozen=True)
class Rates:
    """Speed of one step. mfu and hfu are fractions of the peak, or None where the peak is not known."""

    tokens_per_s: float
    tflops_per_rank: float
    mfu: float | None
    hfu: float | None


def layer_matmul_params(shape: ModelShape) -> int:
    """Weights of one block that take part in matrix products."""
    attention = shape.hidden_size * shape.head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads)
    return attention + _mlp_params(shape)


def _mlp_params(shape: ModelShape) -> int:
    return (3 if shape.gated else 2) * shape.hidden_size * shape.ffn_size


def flops_per_token(shape: ModelShape, seq_len: int) -> int:
    """Model FLOPs per token, forward and backward."""
    matmul = shape.num_layers * layer_matmul_params(shape) + shape.hidden_size * shape.vocab_size
    return 6 * matmul + 3 * shape.num_layers * _attention_forward(shape, seq_len)


def recompute_flops_per_token(shape: ModelShape, seq_len: int, *, layers: Iterable[Collection[str]]) -> int:
    """FLOPs per token that recompute adds.

    Args:
        layers: the ops that each block runs again: attention (its core), mlp, full (the block's forward), or others,
            which multiply no matrices.
    """
    attention = _attention_forward(shape, seq_len)
    cost = {
        "attention": attention,
        "mlp": 2 * _mlp_params(shape),
        "full": 2 * layer_matmul_params(shape) + attention,
    }
    return sum(cost.get(op, 0) for ops in layers for op in ops)


def rates(
    step_tokens: int, step_time_s: float, *, num_ranks: int, model_flops: int, recompute_flops: int, peak: float | None
) -> Rates:
    """Speed of a step of `step_tokens` (the global batch: sequences x length, counted once) over all ranks.

    `model_flops` and `recompute_flops` are per token; `peak` is one rank's dense peak in FLOP/s.
    """
    tokens_per_s = step_tokens / step_time_s
    per_rank = tokens_per_s / num_ranks
    return Rates(
        tokens_per_s=tokens_per_s,
        tflops_per_rank=per_rank * model_flops / 1e12,
        mfu=per_rank * model_flops / peak if peak else None,
        hfu=per_rank * (model_flops + recompute_flops) / peak if peak else None,
    )


def _attention_forward(shape: ModelShape, seq_len: int) -> int:
    """q k^T and p v of one layer, per token: two products of N * H * S multiply-adds."""
    return 4 * shape.num_heads * shape.head_dim * seq_len
