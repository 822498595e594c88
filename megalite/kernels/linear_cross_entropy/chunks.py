"""The loops of linear cross entropy: logits of a few hundred rows at a time, in one buffer that is used again.

Shared by the implementations, which differ in the kernels of cross entropy that work on a chunk. The logits are made by
the library's GEMM in x's dtype, with fp32 sums.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

MIN_ROWS = 512
"""Below this many rows a GEMM no longer hides the reading of the weight."""
CHUNK = 1 << 24
"""Elements of a chunk of logits, if that leaves at least MIN_ROWS rows."""


Accumulate = Callable[[Tensor, Tensor], object]
"""Adds d^T x to the weight's gradient, for the gradient d (rows, columns) of a chunk of logits and its x (rows, D)."""


def logits_of(x: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their logits x @ weight^T), chunk by chunk; the next chunk overwrites them."""
    num_rows, columns = x.shape[0], weight.shape[0]
    size = max(1, min(num_rows, max(MIN_ROWS, CHUNK // columns)))
    buffer = x.new_empty(size, columns)
    for low in range(0, num_rows, size):
        at = slice(low, min(low + size, num_rows))
        yield at, torch.mm(x[at], weight.t(), out=buffer[: at.stop - low])


def statistics(x: Tensor, weight: Tensor, targets: Tensor, *, span: dict[str, int], cross_entropy: Any) -> Tensor:
    """The (3, M) of `cross_entropy`, an implementation of kernels/cross_entropy; `span` is its start and num_valid."""
    compute = torch.promote_types(x.dtype, torch.float32)
    out = torch.empty(3, x.shape[0], dtype=compute, device=x.device)
    for at, logits in logits_of(x, weight):
        out[:, at] = cross_entropy.statistics(logits, targets[at], **span)
    return out


def backward(
    dloss: Tensor,
    x: Tensor,
    weight: Tensor,
    normalizer: Tensor,
    targets: Tensor,
    *,
    accumulate: Accumulate | None,
    span: dict[str, int],
    cross_entropy: Any,
) -> Tensor:
    """Make each chunk of logits again, turn it into its gradient d; dx = d @ weight; the weight's share is d^T x."""
    dx = torch.empty_like(x)
    for at, logits in logits_of(x, weight):
        dlogits = cross_entropy.backward(dloss[at], logits, normalizer[:, at], targets[at], **span)
        torch.mm(dlogits, weight, out=dx[at])
        if accumulate is not None:
            accumulate(dlogits, x[at])
    return dx
