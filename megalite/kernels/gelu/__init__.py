"""GELU, tanh form."""

from megalite.kernels.gelu.op import gelu

__all__ = ["gelu"]
