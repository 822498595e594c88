"""Rotary tables of the model, made once per device and length and shared by all blocks of a rank."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megalite.config.schema import Model
from megalite.kernels.rope import tables as rope


@dataclass
class RopeTables:
    """cos and sin for positions 0, 1, ...: fp32, or fp64 when the model computes in fp64."""

    frequency: Tensor
    dtype: torch.dtype
    made: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def get(self, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin (S, H/2)."""
        key = (device, seq_len)
        if key not in self.made:
            self.made[key] = rope.tables(self.frequency, seq_len, dtype=self.dtype, device=device)
        return self.made[key]


def make_rope_tables(model: Model, compute: torch.dtype) -> RopeTables:
    """Tables with the model's theta and scaling."""
    frequency = rope.frequencies(model.head_dim, model.rope_theta)
    scaling = model.rope_scaling
    if scaling is not None and scaling.type == "linear":
        frequency = rope.scale_linear(frequency, factor=scaling.factor)
    elif scaling is not None:
        frequency = rope.scale_llama3(
            frequency,
            factor=scaling.factor,
            low=scaling.low_freq_factor,
            high=scaling.high_freq_factor,
            original=scaling.original_max_seq_len,
        )
    return RopeTables(frequency, torch.promote_types(compute, torch.float32))
