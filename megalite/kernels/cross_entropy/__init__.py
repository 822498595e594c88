"""Cross entropy over a vocabulary slice."""

from megalite.kernels.cross_entropy.op import cross_entropy

__all__ = ["cross_entropy"]
