"""Rotary position embedding."""

from megalite.kernels.rope.op import rope, split_heads

__all__ = ["rope", "split_heads"]
