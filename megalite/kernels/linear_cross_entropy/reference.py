"""Linear cross entropy as pure functions on both sides of the caller's reductions, in plain torch.

Invariant: no (M, columns) tensor; a chunk of logits is made, used and overwritten. Each token may have its own
upstream gradient. fp32 inside (fp64 for fp64); the logits are rounded to x's dtype, as a linear layer's output is.
"""

from torch import Tensor

from megalite.kernels.cross_entropy import reference as cross_entropy
from megalite.kernels.linear_cross_entropy import chunks
from megalite.kernels.wgrad import reference as wgrad

_TOOLS = chunks.Tools(cross_entropy, wgrad)


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
    return chunks.statistics(x, weight, targets, span={"start": start, "num_valid": num_valid}, tools=_TOOLS)


def backward(
    dloss: Tensor,
    x: Tensor,
    weight: Tensor,
    normalizer: Tensor,
    targets: Tensor,
    *,
    main: Tensor | None,
    start: int,
    num_valid: int,
) -> Tensor:
    """The gradient of x (M, D), in x's dtype; that of weight is added to `main` (columns, D) unless it is None.

    Args:
        dloss:      (M,) upstream gradient of each token.
        normalizer: (2, M) of the whole row: its largest logit and the sum of exp(logit - largest).
    """
    span = {"start": start, "num_valid": num_valid}
    return chunks.backward(dloss, x, weight, normalizer, targets, main=main, span=span, tools=_TOOLS)
