"""SwiGLU."""

from megalite.kernels.swiglu.op import swiglu

__all__ = ["swiglu"]
