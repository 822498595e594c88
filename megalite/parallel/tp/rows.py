"""Where activation rows lie between tp layers, and the collectives that move them.

With sequence parallel, rank r of tp holds rows [r*M/tp, (r+1)*M/tp) of the M = B*S rows, contiguous, so gathers and
scatters are on dim 0. Without it every rank holds all rows.
Reference: Korthikanti et al., arXiv:2205.05198, section 4.2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.comm.collectives import Work, all_gather, all_reduce, reduce_scatter
from megalite.mesh import Group


@dataclass(frozen=True)
class TensorParallel:
    """The tp group and whether activations between its layers are sharded over their rows."""

    group: Group
    sequence_parallel: bool = False
    begins: bool = False
    """The first half of a layer starts a collective, which another part of the microbatch computes under: begun.py."""

    def __post_init__(self) -> None:
        if self.group.size == 1 and self.sequence_parallel:
            object.__setattr__(self, "sequence_parallel", False)

    @property
    def size(self) -> int:
        """Ranks of the tp group."""
        return self.group.size

    @property
    def rank(self) -> int:
        """This rank's index in the tp group."""
        return self.group.rank

    def row_start(self, num_rows: int) -> int:
        """Index of the first row that this rank holds, out of `num_rows` in all."""
        return self.rank * (num_rows // self.size) if self.sequence_parallel else 0

    def num_local_rows(self, num_rows: int) -> int:
        """Rows that this rank holds, out of `num_rows` in all."""
        return num_rows // self.size if self.sequence_parallel else num_rows


def gather_rows(x: Tensor, tp: TensorParallel, *, site: str) -> Tensor:
    """All rows from this rank's; `x` itself without sequence parallel.

    Communication: all-gather, (tp-1) times x's bytes.
    """
    if not tp.sequence_parallel:
        return x
    full = x.new_empty(x.shape[0] * tp.size, *x.shape[1:])
    all_gather(full, x.contiguous(), tp.group, site=site)
    return full


def check_divisible(num_rows: int, tp: TensorParallel) -> None:
    """Refuse rows that sequence parallel can't share equally."""
    if tp.sequence_parallel and num_rows % tp.size:
        raise ValueError(
            f"micro_batch_size * seq_len = {num_rows} rows are not divisible by mesh.tp={tp.size}; "
            "use a multiple, or mesh.sequence_parallel=false"
        )


def start_reduce_rows(
    partial: Tensor, tp: TensorParallel, *, site: str, exclusive: bool = False
) -> tuple[Work, Tensor]:
    """Begin to sum the ranks' partial sums; the result holds this rank's rows after the wait.

    Args:
        exclusive: nothing else is called on the tp group before the wait: see reduce_scatter.

    Communication: reduce-scatter with sequence parallel, (tp-1)/tp of partial's bytes; else all-reduce, in place,
    twice that.
    """
    if not tp.sequence_parallel:
        return all_reduce(partial, tp.group, site=site, async_op=True), partial
    check_divisible(partial.shape[0], tp)
    own = partial.new_empty(partial.shape[0] // tp.size, *partial.shape[1:])
    work = reduce_scatter(own, partial.contiguous(), tp.group, site=site, async_op=True, exclusive=exclusive)
    return work, own


def reduce_rows(partial: Tensor, tp: TensorParallel, *, site: str) -> Tensor:
    """As start_reduce_rows, waited for."""
    work, result = start_reduce_rows(partial, tp, site=site)
    work.wait()
    return result


def empty_param(shape: tuple[int, ...], dtype: torch.dtype) -> torch.nn.Parameter:
    """A parameter with a shape and no storage; ZeRO or `model.init.materialize` gives it one."""
    return torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
