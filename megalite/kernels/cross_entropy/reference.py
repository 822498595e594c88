"""Cross entropy over one slice of the vocabulary, as pure functions on both sides of the caller's reductions.

`statistics` reads the logits once; op.py combines the statistics of all slices; `backward` turns the logits into their
gradient. Columns from `num_valid` on are padding: they have no share in the loss and get a zero gradient. fp32 inside
(fp64 for fp64).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megalite.batch import IGNORE

PIECE = 1 << 18
"""Elements of the temporaries on CPU: they stay in the cache."""


def statistics(logits: Tensor, targets: Tensor, *, start: int, num_valid: int) -> Tensor:
    """Per row of this slice: its largest logit, the sum of exp(logit - largest), and the target's logit.

    Args:
        logits:    (M, columns), columns [start, start + columns) of the vocabulary.
        targets:   (M,) int64; one that is not in the slice, as IGNORE, counts as a logit of 0.
        num_valid: leading columns that are not padding; with none the row is (-inf, 0, 0).

    Returns:
        (3, M) in the compute dtype.
    """
    compute = torch.promote_types(logits.dtype, torch.float32)
    out = torch.zeros(3, logits.shape[0], dtype=compute, device=logits.device)
    if num_valid == 0:
        out[0] = -torch.inf
        return out
    for at in _pieces(logits, num_valid):
        wide = logits[at, :num_valid].to(compute)
        local, inside = _local(targets[at], start, num_valid)
        largest = torch.amax(wide, -1, out=out[0, at])
        shift = largest.masked_fill(largest == -torch.inf, 0.0)
        out[2, at] = wide.gather(1, local[:, None])[:, 0].masked_fill_(~inside, 0.0)
        torch.sum((wide - shift[:, None]).exp_(), dim=1, out=out[1, at])
    return out


def backward(
    dloss: Tensor, logits: Tensor, normalizer: Tensor, targets: Tensor, *, start: int, num_valid: int
) -> Tensor:
    """Overwrite `logits` with its gradient (softmax - one_hot(target)) * dloss and return it.

    Args:
        dloss:      (M,); not read where the target is IGNORE, whose gradient is zero.
        normalizer: (2, M) of the whole row: its largest logit and the sum of exp(logit - largest).
    """
    dloss = dloss.masked_fill(targets == IGNORE, 0.0)
    logits[:, num_valid:].zero_()
    for at in _pieces(logits, num_valid) if num_valid else ():
        piece = logits[at, :num_valid]
        largest, total = normalizer[:, at, None]
        wide = piece.to(normalizer.dtype).sub_(largest).exp_().mul_(dloss[at, None] / total)
        local, inside = _local(targets[at], start, num_valid)
        wide.scatter_add_(1, local[:, None], (-dloss[at] * inside)[:, None])
        if wide.data_ptr() != piece.data_ptr():
            piece.copy_(wide)
    return logits


def _pieces(logits: Tensor, columns: int) -> Iterator[slice]:
    """Runs of rows of about PIECE elements on CPU; all rows at once elsewhere, where each launch costs."""
    num_rows = logits.shape[0]
    rows = max(1, PIECE // columns) if logits.device.type == "cpu" else max(1, num_rows)
    return (slice(low, low + rows) for low in range(0, num_rows, rows))


def _local(targets: Tensor, start: int, num_valid: int) -> tuple[Tensor, Tensor]:
    """Column of each target in the slice, 0 when it is outside; and whether it is inside."""
    local = targets - start
    inside = (local >= 0) & (local < num_valid)
    return local.mul(inside), inside
