"""Cases of linear cross entropy on one slice: (rows, width, columns, valid columns)."""

import torch
from torch import Tensor

from megalite.batch import IGNORE
from megalite.kernels.cases import Case, each, randn
from megalite.kernels.linear_cross_entropy import reference
from megalite.kernels.linear_cross_entropy.op import linear_cross_entropy


def make_case(rows: int, width: int, columns: int, valid: int, *, dtype: torch.dtype) -> Case:
    """Normal x and weight; padding whose logits would be large; every third row is skipped."""

    def make(generator):
        x = randn((rows, width), dtype, generator)
        weight = randn((columns, width), dtype, generator)
        weight[valid:] *= 20.0
        targets = torch.randint(valid, (rows,), generator=generator)
        targets[::3] = IGNORE
        return [x, weight], (targets, valid)

    moved = (rows + columns) * width * dtype.itemsize
    work = 2 * rows * width * columns
    return Case(f"{rows}x{width}x{columns}v{valid}", dtype, make, moved, 2 * moved, flops=4 * work)


def call(x: Tensor, weight: Tensor, targets: Tensor, valid: int, *, impl=reference) -> Tensor:
    """The op."""
    return linear_cross_entropy(x, weight, targets, num_valid=valid, impl=impl)


def truth(x: Tensor, weight: Tensor, targets: Tensor, valid: int) -> Tensor:
    """logsumexp - target of the logits."""
    logits = x @ weight[:valid].t()
    target = logits.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return torch.where(targets == IGNORE, 0.0, logits.logsumexp(-1) - target)


CASES = each(make_case, [(1, 1, 1, 1), (4, 8, 3, 3), (65, 16, 129, 120), (40, 8, 70, 70), (0, 4, 8, 8)])
BENCH = each(make_case, [(8192, 4096, 128256, 128256), (8192, 8192, 16032, 16032)], (torch.bfloat16,))
