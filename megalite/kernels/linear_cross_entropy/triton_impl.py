"""Linear cross entropy with the Triton kernels of cross entropy on each chunk; the GEMMs are the library's."""

from torch import Tensor

from megalite.kernels.cross_entropy import triton_impl as cross_entropy
from megalite.kernels.linear_cross_entropy import chunks

COMPILE = []
"""No kernels of its own."""


def statistics(x: Tensor, weight: Tensor, targets: Tensor, *, start: int, num_valid: int) -> Tensor:
    """As reference.statistics."""
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
    """As reference.backward."""
    span = {"start": start, "num_valid": num_valid}
    return chunks.backward(
        dloss, x, weight, normalizer, targets, accumulate=accumulate, span=span, cross_entropy=cross_entropy
    )
