"""Causal self-attention on packed heads, with the rotary embedding."""

from megalite.kernels.attention.op import attention

__all__ = ["attention"]
