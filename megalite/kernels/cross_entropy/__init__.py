"""Cross entropy over a vocabulary slice."""

from megalite.kernels.cross_entropy.op import Reduce, alone, check_targets, combine, cross_entropy

__all__ = ["Reduce", "alone", "check_targets", "combine", "cross_entropy"]
