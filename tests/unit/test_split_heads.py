"""q, k and v of a packed tensor: values, one gradient tensor, both ways of joining it; what runs in fp32 models."""

import pytest
import torch

from megalite import native
from megalite.kernels.rope import native_impl, reference, split_heads
from megalite.kernels.rope.tables import frequencies, tables
from megalite.mesh import single_device_mesh
from tests.kernels.native_tools import Calls
from tests.unit.model_tools import GPT, LLAMA, make_batch, make_config, make_stages, params_of, run, set_main_grads

HEADS, SHAPE = (4, 2, 2), (2, 5, 8, 6)
LAYERS = {"rmsnorm", "rmsnorm_backward", "swiglu", "attention"}
each_impl = pytest.mark.parametrize("impl", [reference, native_impl], ids=["reference", "native"])


def packed(dtype):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def angles_of(dtype):
    return tables(frequencies(SHAPE[3], 100.0), SHAPE[1], dtype=dtype, device=torch.device("cpu"))


def skip_unbuilt(impl):
    if impl is native_impl and native.load() is None:
        pytest.skip(f"not built: {native.why_missing()}")


@each_impl
@pytest.mark.parametrize("rotated", [True, False])
def test_values_and_gradient_are_those_of_slices(impl, rotated):
    skip_unbuilt(impl)
    qkv, angles = packed(torch.float32).requires_grad_(), angles_of(torch.float32) if rotated else None
    q, k, v = split_heads(qkv, heads=HEADS, angles=angles, impl=impl)
    plain = packed(torch.float32).requires_grad_()
    turned = plain
    if rotated:
        cos, sin = (table.repeat(1, 2)[:, None] for table in angles)
        half = torch.cat([-plain[..., 3:], plain[..., :3]], dim=-1)
        turned = torch.cat([(plain * cos + half * sin)[:, :, :6], plain[:, :, 6:]], dim=2)
    slices = [part.transpose(1, 2) for part in turned.split(HEADS, dim=2)]
    for found, expected in zip((q, k, v), slices, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for parts in ((q, k, v), slices):  # gradients of different layouts
        (parts[0].square().sum() + parts[1].transpose(1, 2).exp().sum() + 3.0 * parts[2].sum()).backward()
    torch.testing.assert_close(qkv.grad, plain.grad, rtol=1e-6, atol=1e-6)
    assert qkv.grad.is_contiguous()


@pytest.mark.parametrize("rotated", [True, False])
def test_gradcheck(rotated):
    angles = angles_of(torch.float64) if rotated else None
    qkv = packed(torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: split_heads(x, heads=HEADS, angles=angles), (qkv,))


def test_without_angles_nothing_is_copied():
    qkv = packed(torch.float32)
    parts = split_heads(qkv, heads=HEADS)
    assert {part.untyped_storage().data_ptr() for part in parts} == {qkv.untyped_storage().data_ptr()}


def test_native_joins_the_gradients_in_one_call(monkeypatch):
    calls = Calls(monkeypatch)
    qkv = packed(torch.float32).requires_grad_()
    parts = split_heads(qkv, heads=HEADS, angles=angles_of(torch.float32), impl=native_impl)
    monkeypatch.setattr(torch, "cat", None)
    torch.autograd.backward(parts, [torch.ones_like(part) for part in parts])
    assert calls.names == ["rope", "rope"]


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"heads=\(4, 2, 1\) are not q, k and v of qkv"):
        split_heads(packed(torch.float32), heads=(4, 2, 1))
    with pytest.raises(ValueError, match=r"heads=\(4, 4\) are not q, k and v of qkv"):
        split_heads(packed(torch.float32), heads=(4, 4))
    with pytest.raises(ValueError, match="do not fit qkv"):
        split_heads(packed(torch.float32), heads=HEADS, angles=(torch.ones(4, 3), torch.ones(4, 3)))


def outcome(model, dtype, **sections):
    """Losses and gradients of one microbatch in training mode."""
    config = make_config(model, dtype=dtype, **sections)
    stages = make_stages(config, single_device_mesh())
    set_main_grads(stages, torch.float64 if dtype == "fp64" else torch.float32)
    for stage in stages:
        stage.train()
    losses = run(stages, make_batch(config), full_recompute=sections.get("recompute") == "full")
    return [losses.double(), *(param.main_grad.double() for param in params_of(stages))]


@pytest.mark.parametrize(
    ("model", "kernels", "names"),
    [
        (LLAMA, {}, LAYERS),
        (LLAMA, {"rope": "native"}, LAYERS - {"attention"} | {"rope"}),
        (LLAMA | {"dropout": 0.2, "attention_dropout": 0.2}, {}, LAYERS - {"attention"} | {"rope"}),
        (GPT | {"norm": "rmsnorm"}, {}, LAYERS - {"swiglu"}),
    ],
    ids=["llama", "explicit_rope", "dropout", "rmsnorm_without_rope"],
)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_model_runs_native_kernels_in_fp32_and_means_the_same(model, kernels, names, recompute, monkeypatch):
    calls = Calls(monkeypatch)
    expected = outcome(model, "fp64", recompute=recompute)
    assert not {"rope", "attention"} & set(calls.names)
    found = outcome(model, "fp32", recompute=recompute, kernels=kernels)
    assert set(calls.names) - {"philox_words", "simd_level"} == names  # which are no kernels of layers
    scale = max(float(x.abs().max()) for x in expected[1:])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * scale)
