"""The head when each rank of tp holds one slice of the vocabulary: projection and cross entropy in one.

Invariant: neither a full row of logits nor, beyond a few MB on CPU, the (M, Vp/tp) of this rank's slice exist; rows are
gathered once in forward, and dx is summed once in backward, over all chunks together.
"""

from torch import Tensor

from megalite.comm.collectives import all_reduce
from megalite.kernels.cross_entropy import alone
from megalite.kernels.linear_cross_entropy import linear_cross_entropy
from megalite.parallel.tp.begun import Finish, FinishGather, StartGather, way_of
from megalite.parallel.tp.rows import TensorParallel

SITE = "head"


def begin_all_rows(x: Tensor, *, tp: TensorParallel) -> Finish:
    """Every row of x, for vocab_parallel_linear_cross_entropy; in two halves, as begun.py has it.

    Communication: forward all-gathers x's rows (sequence parallel); backward reduce-scatters dx, or all-reduces it
    without sequence parallel.
    """
    if tp.size == 1:
        return lambda: x
    way = way_of(tp, SITE)
    full = StartGather.apply(x, way)
    return lambda: FinishGather.apply(full, way)


def vocab_parallel_linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, *, tp: TensorParallel, vocab_size: int, impl, wgrad
) -> Tensor:
    """Cross entropy per token of x @ weight^T; rank r holds rows [r*Vp/tp, (r+1)*Vp/tp), Vp the padded vocabulary.

    Args:
        x:          (M, D), of begin_all_rows.
        weight:     (Vp/tp, D); its gradient goes to `main_grad` if it has one.
        targets:    (M,) int64, the same on every rank; -100 marks a row to skip.
        vocab_size: logical vocabulary; rows of weight beyond it are padding, which has no share in the loss.
        impl:       an implementation of kernels/linear_cross_entropy.
        wgrad:      an implementation of kernels/wgrad.

    Returns:
        (M,) fp32 (fp64 for fp64), the same on every rank, 0 for skipped rows. Not averaged: train/step.py divides.

    Communication: forward all-reduces M (max) and 2*M numbers (packed sum and target logit).
    Numerics: max, exp and sum in fp32 for any narrower dtype.
    Memory: keeps the gathered x.
    Reference: Shoeybi et al., arXiv:1909.08053, section 3.
    """

    def reduce(tensor: Tensor, op: str) -> None:
        all_reduce(tensor, tp.group, op=op, site=f"loss.{op}")

    start = tp.rank * weight.shape[0]
    num_valid = max(0, min(weight.shape[0], vocab_size - start))
    return linear_cross_entropy(
        x,
        weight,
        targets,
        start=start,
        num_valid=num_valid,
        reduce=alone if tp.size == 1 else reduce,
        impl=impl,
        wgrad=wgrad,
    )
