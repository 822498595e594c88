"""GELU, tanh form, alone and with the bias add before it."""

from megalite.kernels.gelu.op import BiasGelu, bias_gelu, gelu

__all__ = ["BiasGelu", "bias_gelu", "gelu"]
