"""Sum of squares of flat gradients."""

from megalite.kernels.grad_norm.op import square_sum

__all__ = ["square_sum"]
