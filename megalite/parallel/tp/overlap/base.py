"""The collective and the GEMM of a tp linear as one function, so that one may run under the other.

Invariant: every backend computes the same as `none` (none.py) to rounding, the same bits in every run, and records one
entry per call in the ledger: what a whole collective sends, in however many messages it travels.
Without sequence parallel rows are whole on every rank: gathers send nothing and reductions are all-reduces.
Reference: Korthikanti et al., arXiv:2205.05198, section 4.2; Wang et al., ASPLOS 2023 (decomposed collectives).
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor

from megalite.parallel.tp.rows import TensorParallel

T = TypeVar("T")
ALL_ROWS = slice(None)


class WeightGrad(Protocol):
    """A row linear's weight gradient from gathered rows."""

    def __call__(self, full: Tensor, rows: slice = ALL_ROWS) -> Tensor | None:
        """The share of `rows` of the gathered dy (M, N); None when it went into a main gradient. A backend takes every
        row once, in one call or several, and returns the sum of the shares. The call may keep `full`."""
        ...


class Overlap(Protocol):
    """A backend. M rows over all ranks of tp, of which `M/tp` are this rank's with sequence parallel."""

    name: str

    def gather_gemm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, tp: TensorParallel, site: str
    ) -> tuple[Tensor, Tensor]:
        """Column forward: x (M/tp, K), weight (N/tp, K) -> gathered x @ weight^T + bias (M, N/tp), gathered x (M, K).

        Without sequence parallel x has all rows and comes back as it is.
        """
        ...

    def gemm_reduce(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, tp: TensorParallel, site: str) -> Tensor:
        """Row forward: x (M, K/tp), weight (N, K/tp) -> this rank's rows of the sum over ranks of x @ weight^T,
        (M/tp, N), or (M, N) without sequence parallel; the bias is added once, to the sum."""
        ...

    def dgrad_reduce(
        self, dy: Tensor, weight: Tensor, *, tp: TensorParallel, site: str, meanwhile: Callable[[], T]
    ) -> tuple[Tensor, T]:
        """Column backward: dy (M, N/tp), weight (N/tp, K) -> this rank's rows of the sum over ranks of dy @ weight, and
        what `meanwhile` (the weight gradient) returns, which may run under the sum."""
        ...

    def gather_dgrad(
        self, dy: Tensor, weight: Tensor, *, tp: TensorParallel, site: str, meanwhile: WeightGrad
    ) -> tuple[Tensor, Tensor | None]:
        """Row backward: dy (M/tp, N), weight (N, K/tp) -> gathered dy @ weight (M, K/tp), and the weight gradient,
        which may run under the gather on rows that are there."""
        ...

    def close(self) -> None:
        """Let go of what it holds, after the last call and a wait for all ranks' calls.

        Raises:
            RuntimeError: one of the last calls has failed, which may be known only now.
        """
        ...


class Passes(NamedTuple):
    """The backends of one linear."""

    forward: Overlap
    backward: Overlap
