"""Cases of cross entropy on one slice: (rows, columns, valid columns)."""

import torch
from torch import Tensor

from megalite.batch import IGNORE
from megalite.kernels.cases import Case, each, randn
from megalite.kernels.cross_entropy import reference
from megalite.kernels.cross_entropy.op import cross_entropy


def make_case(rows: int, columns: int, valid: int, *, dtype: torch.dtype) -> Case:
    """Normal logits, large ones in the padding; every third row is skipped."""

    def make(generator):
        logits = 4.0 * randn((rows, columns), dtype, generator)
        logits[:, valid:] = 50.0
        targets = torch.randint(valid, (rows,), generator=generator)
        targets[::3] = IGNORE
        return [logits], (targets, valid)

    moved = rows * columns * dtype.itemsize
    return Case(f"{rows}x{columns}v{valid}", dtype, make, moved, 2 * moved, flops=4 * rows * columns)


def call(logits: Tensor, targets: Tensor, valid: int, *, impl=reference) -> Tensor:
    """The op, on a copy, since its backward overwrites the logits."""
    return cross_entropy(logits * 1.0, targets, num_valid=valid, impl=impl)


def truth(logits: Tensor, targets: Tensor, valid: int) -> Tensor:
    """logsumexp - target."""
    logits = logits[:, :valid]
    target = logits.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return torch.where(targets == IGNORE, 0.0, logits.logsumexp(-1) - target)


CASES = each(make_case, [(1, 1, 1), (4, 3, 3), (7, 16, 11), (65, 129, 129), (0, 8, 8)])
BENCH = each(make_case, [(8192, 128256, 128256), (8192, 16032, 16032)], (torch.bfloat16,))
