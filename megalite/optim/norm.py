"""Global gradient norm and clipping over shards: every logical parameter counts once.

Counted on one rank each: dp replicas, tp replicas (norm weights, replicated kv heads) and the head's copy of a tied
embedding are left out everywhere but on their first holder.
"""

import torch
from torch import Tensor

from megalite.kernels.grad_norm import reference, square_sum
from megalite.parallel.zero.layout import Run
from megalite.parallel.zero.manager import ZeroManager


def counted(run: Run) -> bool:
    """Whether this rank's copy of the run is the one that counts (and is saved)."""
    return run.part.replica == 0 and not run.slot.spec.tied_copy


def local_square_sum(zero: ZeroManager, *, impl=reference) -> Tensor:
    """Sum of squares of the gradients that this rank counts, fp64 scalar; add over all ranks for the global one.

    Numerics: squares and sums in fp64.
    """
    total = torch.zeros((), dtype=torch.float64, device=zero.mesh.device)
    if not zero.owns_replica:
        return total
    for unit in zero.units.values():
        for begin, end in zero.segments(unit, counted):
            total += square_sum(unit.grad[begin:end], impl=impl)
    return total


def clip_factor(norm: float, clip_norm: float) -> float:
    """What gradients are multiplied with: min(1, clip_norm / (norm + 1e-6)), 1 when clip_norm is 0 (torch's rule)."""
    return min(1.0, clip_norm / (norm + 1e-6)) if clip_norm > 0 else 1.0
