"""Cross entropy over one slice of the vocabulary, as pure functions around the two reductions of the caller.

The caller reduces `row_max` (max) and `sum_and_target` (sum) over the ranks that hold the other slices. Columns from
`num_valid` on are padding: they have no share in the loss and get a zero gradient. fp32 inside (fp64 for fp64).
"""

import torch
from torch import Tensor

from megalite.batch import IGNORE

PIECE = 1 << 22
"""Elements of the largest temporary."""


def row_max(logits: Tensor, num_valid: int) -> Tensor:
    """Largest valid logit per row (M,) in the compute dtype; -inf where this slice is all padding."""
    compute = torch.promote_types(logits.dtype, torch.float32)
    if num_valid == 0:
        return torch.full(logits.shape[:1], -torch.inf, dtype=compute, device=logits.device)
    return logits[:, :num_valid].amax(-1).to(compute)


def sum_and_target(logits: Tensor, maximum: Tensor, targets: Tensor, *, start: int, num_valid: int) -> Tensor:
    """Per row: the sum of exp(logit - maximum) and the target's logit - maximum if it lies in this slice, else 0.

    Args:
        logits:  (M, columns), columns [start, start + columns) of the vocabulary.
        maximum: (M,) over the whole vocabulary.
        targets: (M,) int64; IGNORE lies in no slice.

    Returns:
        (2, M) in maximum's dtype: one tensor, so that one collective reduces both.
    """
    packed = torch.zeros(2, *maximum.shape, dtype=maximum.dtype, device=logits.device)
    if num_valid == 0:
        return packed
    rows = max(1, PIECE // num_valid)
    for low in range(0, logits.shape[0], rows):
        at = slice(low, low + rows)
        shifted = logits[at, :num_valid].to(maximum.dtype) - maximum[at, None]
        local, inside = _local(targets[at], start, num_valid)
        packed[1, at] = shifted.gather(1, local[:, None])[:, 0].mul_(inside)
        torch.sum(shifted.exp_(), dim=1, out=packed[0, at])
    return packed


def loss(packed: Tensor, targets: Tensor) -> Tensor:
    """log(sum) - target per row (M,) from the reduced `packed`; 0 where the target is IGNORE."""
    return (packed[0].log() - packed[1]).masked_fill_(targets == IGNORE, 0.0)


def backward(dloss: Tensor, logits: Tensor, log_sum: Tensor, targets: Tensor, *, start: int, num_valid: int) -> Tensor:
    """Overwrite `logits` with its gradient (softmax - one_hot(target)) * dloss and return it.

    Args:
        log_sum: (M,) log of the sum of exp of the whole row.
    """
    dloss = dloss.masked_fill(targets == IGNORE, 0.0)
    logits[:, num_valid:].zero_()
    rows = max(1, PIECE // max(1, num_valid))
    for low in range(0, logits.shape[0] if num_valid else 0, rows):
        at = slice(low, low + rows)
        piece = logits[at, :num_valid]
        wide = piece.to(log_sum.dtype).sub_(log_sum[at, None]).exp_().mul_(dloss[at, None])
        local, inside = _local(targets[at], start, num_valid)
        wide.scatter_add_(1, local[:, None], (-dloss[at] * inside)[:, None])
        if wide.data_ptr() != piece.data_ptr():
            piece.copy_(wide)
    return logits


def _local(targets: Tensor, start: int, num_valid: int) -> tuple[Tensor, Tensor]:
    """Column of each target in the slice, 0 when it is outside; and whether it is inside."""
    local = targets - start
    inside = (local >= 0) & (local < num_valid)
    return local.mul(inside), inside
