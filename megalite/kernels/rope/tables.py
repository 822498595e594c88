"""The angles of rotary embedding: cos and sin of position * frequency, never rounded by a model-wide cast.

Invariant: a pure function of the model's numbers and the length, so every pipeline stage holds the same table.
Computed in fp64 from integer positions and rounded once.
Reference: Su et al., arXiv:2104.09864; the llama3 rule as in transformers (modeling_rope_utils).
"""

import math

import torch
from torch import Tensor


def frequencies(head_dim: int, theta: float) -> Tensor:
    """theta^(-2i/H) for i < H/2, in fp64."""
    return theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)


def scale_linear(frequency: Tensor, *, factor: float) -> Tensor:
    """Positions divided by `factor`."""
    return frequency / factor


def scale_llama3(frequency: Tensor, *, factor: float, low: float, high: float, original: int) -> Tensor:
    """Keep wavelengths shorter than original / high, divide those longer than original / low, blend between."""
    wavelength = 2.0 * math.pi / frequency
    blend = (original / wavelength - low) / (high - low)
    between = (1.0 - blend) * frequency / factor + blend * frequency
    scaled = torch.where(wavelength > original / low, frequency / factor, between)
    return torch.where(wavelength < original / high, frequency, scaled)


def tables(frequency: Tensor, num_positions: int, *, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, each (num_positions, H/2), in `dtype` (fp32 or fp64)."""
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequency
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)
