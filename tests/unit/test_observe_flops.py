"""FLOPs against torch's counter on a model written out here, rates by hand, and the table of peaks."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from megalite.observe.flops import ModelShape, flops_per_token, rates, recompute_flops_per_token
from megalite.observe.hardware import device_name, peak_flops, peak_memory_gb

LLAMA = ModelShape(
    num_layers=3, hidden_size=64, num_heads=4, num_kv_heads=1, head_dim=16, ffn_size=172, vocab_size=101, gated=True
)
GPT = dataclasses.replace(LLAMA, num_kv_heads=4, ffn_size=256, gated=False)
WIDE_HEADS = dataclasses.replace(LLAMA, head_dim=24, num_kv_heads=2)


def block(x: torch.Tensor, shape: ModelShape) -> torch.Tensor:
    """One transformer block's matrix products on (B, S, D), with attention written out."""
    d, n, k, h, f = shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.ffn_size
    batch, length, _ = x.shape
    q = F.linear(x, torch.zeros(n * h, d)).view(batch, length, n, h).transpose(1, 2)
    key, value = (F.linear(x, torch.zeros(k * h, d)).view(batch, length, k, h).transpose(1, 2) for _ in range(2))
    key, value = (t.repeat_interleave(n // k, dim=1) for t in (key, value))
    mixed = torch.softmax(q @ key.transpose(-1, -2), dim=-1) @ value
    x = F.linear(mixed.transpose(1, 2).reshape(batch, length, n * h), torch.zeros(d, n * h))
    up = F.linear(x, torch.zeros(f, d))
    up = F.silu(F.linear(x, torch.zeros(f, d))) * up if shape.gated else F.gelu(up)
    return F.linear(up, torch.zeros(d, f))


def counted_forward(shape: ModelShape, *, batch: int, length: int) -> float:
    with FlopCounterMode(display=False) as counter:
        x = F.embedding(torch.zeros(batch, length, dtype=torch.int64), torch.zeros(shape.vocab_size, shape.hidden_size))
        for _ in range(shape.num_layers):
            x = block(x, shape)
        F.linear(x, torch.zeros(shape.vocab_size, shape.hidden_size))
    return counter.get_total_flops() / (batch * length)


@pytest.mark.parametrize("shape", [LLAMA, GPT, WIDE_HEADS], ids=["llama", "gpt", "wide_heads"])
def test_equals_three_counted_forwards(shape):
    """M01, M02: custom ffn, GQA, head dim; both attention products; the head, not the embedding."""
    assert flops_per_token(shape, 40) == pytest.approx(3 * counted_forward(shape, batch=2, length=40), rel=1e-9)


def test_a_known_model_by_hand():
    """GPT-2 124M: 84.9 M block weights + 38.6 M head, and 12 * L * D * S for attention."""
    shape = ModelShape(12, 768, 12, 12, 64, 3072, 50257, gated=False)
    assert flops_per_token(shape, 1024) == 6 * (12 * 12 * 768**2 + 768 * 50257) + 12 * 12 * 768 * 1024


def test_recompute_is_one_more_forward_of_what_is_recomputed():
    one = dataclasses.replace(LLAMA, num_layers=1)
    with FlopCounterMode(display=False) as counter:
        block(torch.zeros(2, 40, 64), one)
    assert recompute_flops_per_token(one, 40, layers=[{"full"}]) == counter.get_total_flops() / 80
    assert recompute_flops_per_token(LLAMA, 40, layers=[{"attention", "activation"}] * 3) == 3 * 4 * 64 * 40
    assert recompute_flops_per_token(LLAMA, 40, layers=[set()] * 3) == 0
    mlp = 2 * 3 * 64 * 172
    assert recompute_flops_per_token(LLAMA, 40, layers=[set(), {"attention", "mlp"}, {"mlp"}]) == 2 * mlp + 4 * 64 * 40


def test_rates():
    """M03, M05: tokens/s x time is the global batch; MFU does not change with dp at the same time per step."""
    keys = {"model_flops": 6e9, "recompute_flops": 2e9, "peak": 312e12}
    one = rates(8 * 1024, 2.0, num_ranks=1, **keys)
    two = rates(16 * 1024, 2.0, num_ranks=2, **keys)
    assert one.tokens_per_s * 2.0 == 8 * 1024
    assert two.tokens_per_s * 2.0 == 16 * 1024
    assert (one.mfu, one.hfu, one.tflops_per_rank) == (two.mfu, two.hfu, two.tflops_per_rank)
    assert one.mfu == pytest.approx(4096 * 6e9 / 312e12)
    assert one.hfu == pytest.approx(one.mfu * 8 / 6)
    assert one.tflops_per_rank == pytest.approx(24.576)
    unknown = rates(8, 1.0, num_ranks=1, model_flops=1, recompute_flops=0, peak=None)
    assert (unknown.mfu, unknown.hfu) == (None, None)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 836),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA A10", 125),
    ],
)
def test_peaks(name, tflops):
    assert peak_flops(name) == tflops * 1e12
    assert peak_flops(name, compute="fp32") is None


@pytest.mark.parametrize("name", ["cpu", "NVIDIA A1000", "NVIDIA H1000", "Tesla P4", "NVIDIA L400", "AMD MI300X"])
def test_unknown_hardware_has_no_peak(name):
    assert peak_flops(name) is None


def test_memory_of_this_process_is_plausible():
    before = peak_memory_gb(torch.device("cpu"))
    held = torch.ones(64 << 20)  # 0.25 GiB
    assert device_name(held.device) == "cpu"
    assert 0.05 < before < 64
    assert peak_memory_gb(held.device) >= 0.25
