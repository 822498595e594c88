"""RMSNorm, alone and with the residual add before it."""

from megalite.kernels.rmsnorm.op import rmsnorm, rmsnorm_residual

__all__ = ["rmsnorm", "rmsnorm_residual"]
