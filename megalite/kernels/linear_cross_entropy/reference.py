"""Linear cross entropy as pure functions on both sides of the caller's reductions, in plain torch.

Invariant: no (M, columns) tensor; a chunk of logits is made, used and overwritten. Each token may have its own
upstream gradient. fp32 inside (fp64 for fp64); the logits are rounded to x's dtype, as a linear layer's output is.
"""

from torch import Tensor

from megalite.kernels.cross_entropy import reference as cross_entropy
from megalite.kernels.linear_cross_entropy import chunks


def statistics(x: Tensor, weight: Tensor, targets: Tensor, *, start: int, num_valid: int) -> Tensor:
    """Per row of x @ weight^T: its largest logit, the sum of exp(logit - largest), and the target's logit.

    Args:
        x:         (M, D).
        weight:    (columns, D), rows [start, start + columns) of the vocabulary.
        targets:   (M,) int64; one that is not in the slice, as IGNORE, counts as a logit of 0.
        num_valid: leading rows of weight that are not padding.

    Returns:
        (3, M) in the compute dtype.
    """
    span = {"start": start, "num_valid": num_valid}
    return chunks.statistics(x, weight, targets, span=span, cross_entropy=cross_entropy)


def backward(
    dloss: Tensor,
    x: Tensor,
    weight: Tensor,
    normalizer: Tensor,
    targets: Tensor,
    *,
    accumulate: chunks.Accumulate | None,
    start: int,
    num_valid: int,
) -> Tensor:
    """The gradient of x (M, D), in x's dtype.

    Args:
        dloss:      (M,) upstream gradient of each token.
        normalizer: (2, M) of the whole row: its largest logit and the sum of exp(logit - largest).
        accumulate: called with the gradient of each chunk of logits and its rows of x, it adds their product to the
                    weight's gradient; None where that is not wanted.
    """
    span = {"start": start, "num_valid": num_valid}
    return chunks.backward(
        dloss, x, weight, normalizer, targets, accumulate=accumulate, span=span, cross_entropy=cross_entropy
    )
