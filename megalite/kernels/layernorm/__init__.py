"""LayerNorm."""

from megalite.kernels.layernorm.op import layernorm

__all__ = ["layernorm"]
