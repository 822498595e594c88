"""Dropout of the residual stream and of attention weights, keyed by global indices.

The key is (seed, op name with the layer's index, step); the index of element (row, column) is
((sample_start + b) * S + s) * width + column, so masks do not depend on tp, sequence parallel, pp, dp, microbatches or
recompute.
"""

from torch import Tensor

from megalite.batch import Microbatch
from megalite.kernels.dropout import dropout
from megalite.kernels.philox import stream_key
from megalite.model.context import ModelContext


def residual_dropout(x: Tensor, name: str, *, context: ModelContext, batch: Microbatch) -> Tensor:
    """Dropout of this rank's rows x (rows, D) of the residual stream."""
    if context.model.dropout == 0.0:
        return x
    first = batch.sample_start * batch.tokens.shape[1] + context.tp.row_start(batch.rows)
    key = stream_key(context.seed, "dropout", name, batch.step)
    impl = context.kernels["dropout"]
    return dropout(x, context.model.dropout, key=key, starts=(first * x.shape[1],), impl=impl)


def attention_dropout(weights: Tensor, name: str, *, context: ModelContext, batch: Microbatch) -> Tensor:
    """Dropout of attention weights (B, N/tp, S, S) of this rank's heads."""
    num_samples, num_heads, seq_len, _ = weights.shape
    first_head = context.tp.rank * num_heads
    starts = tuple(
        ((batch.sample_start + b) * context.model.num_heads + first_head) * seq_len * seq_len
        for b in range(num_samples)
    )
    key = stream_key(context.seed, "dropout", name, batch.step)
    impl = context.kernels["dropout"]
    return dropout(weights, context.model.attention_dropout, key=key, starts=starts, impl=impl)
