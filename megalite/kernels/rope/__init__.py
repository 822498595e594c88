"""Rotary position embedding."""

from megalite.kernels.rope.op import rope

__all__ = ["rope"]
