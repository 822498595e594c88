"""RMSNorm."""

from megalite.kernels.rmsnorm.op import rmsnorm

__all__ = ["rmsnorm"]
