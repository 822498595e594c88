"""LayerNorm, alone, with the residual add before it, and beside what it norms."""

from megalite.kernels.layernorm.op import layernorm, layernorm_beside, layernorm_residual

__all__ = ["layernorm", "layernorm_beside", "layernorm_residual"]
