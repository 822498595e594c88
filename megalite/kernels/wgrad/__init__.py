"""Accumulation of parameter gradients."""

from megalite.kernels.wgrad.op import accumulate_bias, accumulate_grad, accumulate_rows, accumulate_wgrad

__all__ = ["accumulate_bias", "accumulate_grad", "accumulate_rows", "accumulate_wgrad"]
