"""LayerNorm, alone and with the residual add before it."""

from megalite.kernels.layernorm.op import layernorm, layernorm_residual

__all__ = ["layernorm", "layernorm_residual"]
