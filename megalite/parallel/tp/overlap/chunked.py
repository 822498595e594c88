"""The collective in pieces, each under the GEMM of another piece; on any transport whose messages do not block.

A gather starts at once, the own rows are multiplied while the others' arrive, then these piece by piece. A reduction
starts with the rows of the next rank and sends each piece while the next one is multiplied, the own rows last; a
column's weight gradient runs under what is still on its way. GEMMs write in place; which rows a piece holds depends on
shapes only, so results are the same bits in every run.
Reference: Wang et al., ASPLOS 2023 (decomposed collectives); Chang et al., arXiv:2406.06858 (the order of the pieces).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.comm.pieces import RowAllReduce, RowGather, RowReduceScatter
from megalite.parallel.tp.overlap.base import T, WeightGrad
from megalite.parallel.tp.overlap.none import NO_OVERLAP
from megalite.parallel.tp.rows import TensorParallel, check_divisible


@dataclass(frozen=True)
class Chunked:
    """Moves each rank's share of the rows in `num_chunks` pieces (fewer when it has fewer rows)."""

    num_chunks: int
    name: str = "chunked"

    def gather_gemm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, tp: TensorParallel, site: str
    ) -> tuple[Tensor, Tensor]:
        """See Overlap."""
        if not tp.sequence_parallel:
            return NO_OVERLAP.gather_gemm(x, weight, bias, tp=tp, site=site)
        y, gather = self._gather_multiply(x, weight.t(), bias, tp=tp, site=site)
        return y, gather.finish()

    def gemm_reduce(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, tp: TensorParallel, site: str) -> Tensor:
        """See Overlap."""
        if tp.size == 1:
            return NO_OVERLAP.gemm_reduce(x, weight, bias, tp=tp, site=site)
        y = self._multiply_reduce(x, weight.t(), tp=tp, site=site).finish()
        return y if bias is None else y.add_(bias)

    def dgrad_reduce(
        self, dy: Tensor, weight: Tensor, *, tp: TensorParallel, site: str, meanwhile: Callable[[], T]
    ) -> tuple[Tensor, T]:
        """See Overlap."""
        if tp.size == 1:
            return NO_OVERLAP.dgrad_reduce(dy, weight, tp=tp, site=site, meanwhile=meanwhile)
        reduction = self._multiply_reduce(dy, weight, tp=tp, site=site)
        result = meanwhile()
        return reduction.finish(), result

    def gather_dgrad(
        self, dy: Tensor, weight: Tensor, *, tp: TensorParallel, site: str, meanwhile: WeightGrad
    ) -> tuple[Tensor, Tensor | None]:
        """See Overlap. The weight gradient of the own rows runs under the gather, too."""
        if not tp.sequence_parallel:
            return NO_OVERLAP.gather_dgrad(dy, weight, tp=tp, site=site, meanwhile=meanwhile)
        shares: list[Tensor | None] = []
        dx, gather = self._gather_multiply(
            dy, weight, None, tp=tp, site=site, meanwhile=lambda full, rows: shares.append(meanwhile(full, rows))
        )
        for rows in gather.others():
            shares.append(meanwhile(gather.full, rows))
        gather.finish()
        return dx, None if shares[0] is None else torch.stack(shares).sum(0)

    def close(self) -> None:
        """See Overlap; there is nothing."""

    def _gather_multiply(
        self,
        x: Tensor,
        matrix: Tensor,
        bias: Tensor | None,
        *,
        tp: TensorParallel,
        site: str,
        meanwhile: Callable[[Tensor, slice], None] | None = None,
    ) -> tuple[Tensor, RowGather]:
        """Gathered x @ matrix + bias; `meanwhile` gets the own rows. All has arrived; the own rows may still leave."""
        x = x.contiguous()
        gather = RowGather(x, tp.group, site=site, num_pieces=self.num_chunks)
        y = x.new_empty(gather.full.shape[0], matrix.shape[1])
        _multiply(x, matrix, bias, out=y[gather.own])
        if meanwhile is not None:
            meanwhile(gather.full, gather.own)
        for rows in gather.arrivals():
            _multiply(gather.full[rows], matrix, bias, out=y[rows])
        return y, gather

    def _multiply_reduce(
        self, x: Tensor, matrix: Tensor, *, tp: TensorParallel, site: str
    ) -> RowReduceScatter | RowAllReduce:
        """The sum over ranks of x @ matrix, whose last pieces may still be on their way."""
        check_divisible(x.shape[0], tp)
        kind = RowReduceScatter if tp.sequence_parallel else RowAllReduce
        shape = (x.shape[0], matrix.shape[1])
        reduction = kind(shape, x, tp.group, site=site, num_pieces=self.num_chunks)
        for rows, out in reduction.pieces():
            _multiply(x[rows], matrix, None, out=out)
        return reduction


def _multiply(x: Tensor, matrix: Tensor, bias: Tensor | None, *, out: Tensor) -> None:
    """out = x @ matrix + bias."""
    if bias is None:
        torch.mm(x, matrix, out=out)
    else:
        torch.addmm(bias, x, matrix, out=out)
