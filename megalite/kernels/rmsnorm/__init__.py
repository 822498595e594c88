"""RMSNorm, alone, with the residual add before it, and beside what it norms."""

from megalite.kernels.rmsnorm.op import rmsnorm, rmsnorm_beside, rmsnorm_residual

__all__ = ["rmsnorm", "rmsnorm_beside", "rmsnorm_residual"]
