"""Projection to the vocabulary and cross entropy in one op."""

from megalite.kernels.linear_cross_entropy.op import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
