"""Cross entropy when each rank of tp holds one slice of the vocabulary. A full row of logits is never assembled."""

from torch import Tensor

from megalite.comm.collectives import all_reduce
from megalite.kernels.cross_entropy import cross_entropy
from megalite.parallel.tp.rows import TensorParallel


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, *, tp: TensorParallel, vocab_size: int) -> Tensor:
    """Cross entropy per token; rank r holds columns [r*Vp/tp, (r+1)*Vp/tp), Vp the padded vocabulary.

    Args:
        logits:     (M, Vp/tp). Backward writes dlogits into this storage; dead afterwards.
        targets:    (M,) int64, the same on every rank; -100 marks a row to skip.
        vocab_size: logical vocabulary; columns beyond it are padding, which has no share in the loss.

    Returns:
        (M,) fp32 (fp64 for fp64), the same on every rank, 0 for skipped rows. Not averaged: train/step.py divides.

    Communication: forward all-reduces M (max) and 2*M numbers (packed sum and target logit); backward none.
    Numerics: max, exp and sum in fp32 for any narrower input dtype.
    Reference: Shoeybi et al., arXiv:1909.08053, section 3.
    """

    def reduce(tensor: Tensor, op: str) -> None:
        all_reduce(tensor, tp.group, op=op, site=f"loss.{op}")

    start = tp.rank * logits.shape[1]
    num_valid = max(0, min(logits.shape[1], vocab_size - start))
    return cross_entropy(logits, targets, start=start, num_valid=num_valid, reduce=reduce)
