"""Linear cross entropy with the Triton kernels of cross entropy on each chunk; the GEMMs are the library's."""

from torch import Tensor

from megalite.kernels.cross_entropy import triton_impl as cross_entropy
from megalite.kernels.linear_cross_entropy import chunks
from megalite.kernels.wgrad import reference as wgrad

COMPILE = []
"""No kernels of its own."""

_TOOLS = chunks.Tools(cross_entropy, wgrad)


def statistics(x: Tensor, weight: Tensor, targets: Tensor, *, start: int, num_valid: int) -> Tensor:
    """As reference.statistics."""
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
    """As reference.backward."""
    span = {"start": start, "num_valid": num_valid}
    return chunks.backward(dloss, x, weight, normalizer, targets, main=main, span=span, tools=_TOOLS)
