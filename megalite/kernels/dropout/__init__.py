"""Dropout."""

from megalite.kernels.dropout.op import dropout

__all__ = ["dropout"]
