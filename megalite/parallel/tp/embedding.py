"""The vocabulary-parallel word embedding and learned positions.

Rank r holds rows [r*Vp/tp, (r+1)*Vp/tp) of the table, Vp the padded vocabulary. A token outside of the shard
contributes zero to a sum over tp that lands on this rank's rows.
Reference: Shoeybi et al., arXiv:1909.08053, section 3.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.kernels.wgrad import accumulate_rows
from megalite.parallel.spec import ParamSpec
from megalite.parallel.tp.begun import Finish, FinishReduce, way_of
from megalite.parallel.tp.rows import TensorParallel, empty_param
from megalite.parallel.tp.specs import local_shape


class _StartEmbedding(torch.autograd.Function):
    """The lookup up to its sum, which is begun."""

    @staticmethod
    def forward(ctx, tokens, weight, way):
        ctx.save_for_backward(tokens)
        ctx.weight, ctx.way = weight, way
        return way.reduce(_partial(tokens, weight, way.tp), "forward")

    @staticmethod
    def backward(ctx, _):
        (tokens,), full = ctx.saved_tensors, ctx.way.wait()
        return None, _add_rows(ctx.weight, tokens, full, ctx.way.tp), None


def _partial(tokens: Tensor, weight: Tensor, tp: TensorParallel) -> Tensor:
    """Rows of this rank's tokens, zeros for the others'."""
    if tp.size == 1:
        return F.embedding(tokens, weight)
    local, outside = _local(tokens, weight, tp)
    return F.embedding(local, weight).masked_fill_(outside, 0.0)


def _add_rows(weight: Tensor, tokens: Tensor, dy: Tensor, tp: TensorParallel) -> Tensor | None:
    """Add the gradient of all rows to that of this rank's tokens."""
    if tp.size > 1:
        tokens, outside = _local(tokens, weight, tp)
        dy = dy.masked_fill(outside, 0.0)
    return accumulate_rows(weight, tokens, dy)


def _local(tokens: Tensor, weight: Tensor, tp: TensorParallel) -> tuple[Tensor, Tensor]:
    """Row of each token in this rank's shard, 0 if it is not there; and whether it is not, as a column."""
    local = tokens - tp.rank * weight.shape[0]
    outside = (local < 0) | (local >= weight.shape[0])
    return local.masked_fill_(outside, 0), outside[:, None]


class VocabParallelEmbedding(nn.Module):
    """Rows of a table that is sharded over tp along the vocabulary; `padding` rows of it belong to no token.

    Communication: forward reduce-scatters (M, D), backward all-gathers it (sequence parallel); else forward
    all-reduces.
    """

    def __init__(self, spec: ParamSpec, *, tp: TensorParallel, dtype: torch.dtype, site: str, padding: int = 0):
        super().__init__()
        self.weight = empty_param(local_shape(spec, padding=padding), dtype)
        self.weight.spec = spec
        self.tp = tp
        self.site = site

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (M,) int64, the same on all ranks -> (M/tp, D), or (M, D) without sequence parallel."""
        return self.begin(tokens)()

    def begin(self, tokens: Tensor) -> Finish:
        """As `forward`, in two halves: see begun.py."""
        way = way_of(self.tp, self.site)
        own = _StartEmbedding.apply(tokens, self.weight, way)
        return lambda: FinishReduce.apply(own, None, way)


class _AddPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, positions):
        ctx.save_for_backward(positions)
        ctx.weight = weight
        return x + weight[positions]

    @staticmethod
    def backward(ctx, dy):
        (positions,) = ctx.saved_tensors
        return dy, accumulate_rows(ctx.weight, positions, dy), None


class LearnedPositions(nn.Module):
    """A replicated table (max_seq_len, D) that is added to this rank's rows; under sequence parallel its gradient is
    partial."""

    def __init__(self, spec: ParamSpec, *, tp: TensorParallel, dtype: torch.dtype):
        super().__init__()
        self.weight = empty_param(local_shape(spec), dtype)
        self.weight.spec = spec
        self.tp = tp

    def forward(self, x: Tensor, *, num_rows: int, seq_len: int) -> Tensor:
        """x + table[row % seq_len] for the rows of x, which are this rank's of `num_rows` = B*S."""
        start = self.tp.row_start(num_rows)
        positions = torch.arange(start, start + x.shape[0], device=x.device) % seq_len
        return _AddPositions.apply(x, self.weight, positions)
