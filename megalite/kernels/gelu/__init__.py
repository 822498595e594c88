"""GELU, tanh form, alone and with the bias add before it."""

from megalite.kernels.gelu.op import bias_gelu, gelu

__all__ = ["bias_gelu", "gelu"]
