"""Whole collectives before or after whole GEMMs: the truth that other backends are compared with, and the fall-back.

The one thing that needs no decomposition is kept: a column's weight gradient runs under the reduction of its dx.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from megalite.parallel.tp.overlap.base import Passes, T, WeightGrad
from megalite.parallel.tp.rows import TensorParallel, gather_rows, reduce_rows, start_reduce_rows


class NoOverlap:
    """Collectives of megalite.comm, waited for where they stand."""

    name = "none"

    def gather_gemm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, tp: TensorParallel, site: str
    ) -> tuple[Tensor, Tensor]:
        """See Overlap."""
        full = gather_rows(x, tp, site=site)
        return F.linear(full, weight, bias), full

    def gemm_reduce(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, tp: TensorParallel, site: str) -> Tensor:
        """See Overlap."""
        if tp.size == 1:
            return F.linear(x, weight, bias)
        y = reduce_rows(F.linear(x, weight), tp, site=site)
        return y if bias is None else y.add_(bias)

    def dgrad_reduce(
        self, dy: Tensor, weight: Tensor, *, tp: TensorParallel, site: str, meanwhile: Callable[[], T]
    ) -> tuple[Tensor, T]:
        """See Overlap."""
        work, dx = start_reduce_rows(dy.mm(weight), tp, site=site, exclusive=True)
        result = meanwhile()
        work.wait()
        return dx, result

    def gather_dgrad(
        self, dy: Tensor, weight: Tensor, *, tp: TensorParallel, site: str, meanwhile: WeightGrad
    ) -> tuple[Tensor, Tensor | None]:
        """See Overlap."""
        full = gather_rows(dy, tp, site=site)
        result = meanwhile(full)
        return full.mm(weight), result

    def close(self) -> None:
        """See Overlap; there is nothing."""


NO_OVERLAP = NoOverlap()
PLAIN = Passes(NO_OVERLAP, NO_OVERLAP)
"""What a layer uses that nobody chose for."""
