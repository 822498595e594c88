"""Rotary tables: precise at far positions, and the published scaling rules as transformers has them."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megalite.kernels.rope import tables as rope


@pytest.mark.parametrize("position", [1857, 131071])
def test_fp32_tables_are_rounded_float64(position):
    frequency = rope.frequencies(128, 500000.0)
    cos, sin = rope.tables(frequency, position + 1, dtype=torch.float32, device=torch.device("cpu"))
    angle = position * 500000.0 ** -(torch.arange(64, dtype=torch.float64) / 64)
    torch.testing.assert_close(cos[position].double(), angle.cos(), rtol=0.0, atol=1e-7)
    torch.testing.assert_close(sin[position].double(), angle.sin(), rtol=0.0, atol=1e-7)


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_scaling_equals_transformers(kind):
    scaling = {"rope_type": kind, "factor": 8.0, "rope_theta": 500000.0}
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=scaling)
    expected, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    plain = rope.frequencies(128, 500000.0)
    found = rope.scale_linear(plain, factor=8.0)
    if kind == "llama3":
        found = rope.scale_llama3(plain, factor=8.0, low=1.0, high=4.0, original=8192)
    assert factor == 1.0
    torch.testing.assert_close(found.float(), expected, rtol=1e-6, atol=0.0)
    assert not torch.allclose(found, plain)
