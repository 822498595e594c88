"""Philox and dropout in Triton, in the interpreter: the reference's bits; and the compiled words of the reference."""

import pytest
import torch
import triton
import triton.language as tl

from megalite import native
from megalite.kernels import registry
from megalite.kernels.check import check_op
from megalite.kernels.dropout import dropout
from megalite.kernels.dropout import reference as dropout_reference
from megalite.kernels.dropout import triton_impl as dropout_triton
from megalite.kernels.philox import fill_keep, fill_normal, reference, triton_impl
from megalite.model.init import init_tensor
from megalite.parallel.spec import ParamSpec, Part
from tests.kernels.addresses import Addresses
from tests.kernels.triton_tools import CPU, INTERPRETED, Launches

KEYS = [(0, 0), (0xFFFFFFFF, 0xFFFFFFFF), (0x80000000, 1), (0xA4093822, 0x299F31D0)]
STARTS = [0, 2**31 - 20, 2**32 - 20, 5 * 2**32 + 7, 2**40]


@triton.jit
def write_words(out, start, key0, key1, BLOCK: tl.constexpr):
    element = tl.arange(0, BLOCK).to(tl.int64)
    w0, w1 = triton_impl.words(start + element, key0, key1)
    tl.store(out + element, w0.to(tl.int64))
    tl.store(out + BLOCK + element, w1.to(tl.int64))


def triton_words(start, key, num=64):
    out = torch.full((2, num), -1)
    write_words[(1,)](out, start, *triton_impl.signed(key), BLOCK=num)
    return out


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("start", STARTS)
def test_words_are_the_references(start, key):
    expected = torch.stack(reference.words(torch.arange(start, start + 64), key))
    assert torch.equal(triton_words(start, key), expected)


def test_known_answer():
    """Random123, kat_vectors: philox4x32 10 of zeros."""
    assert triton_words(0, (0, 0))[:, 0].tolist() == [0x6627E8D5, 0xE169C58D]


@pytest.mark.parametrize("columns", [(0, 40), (8, 16)], ids=["whole rows", "split columns"])
def test_initial_weights(columns, monkeypatch):
    """What a GPU's ranks start from: Triton's numbers in fp32, here the reference's bits, and zeros in the padding."""
    part = Part("w", (100, 40), (20, columns[0]), (12, columns[1]))
    spec = ParamSpec((part,), "linear", init_std=0.02)
    made = {"dtype": torch.float32, "device": "cpu", "seed": 3}
    expected = init_tensor(spec, (14, columns[1]), **made)
    assert expected[:12].all()
    launches = Launches(monkeypatch, triton_impl, "_normal")
    monkeypatch.setattr(registry, "ORDER", {"cpu": ("triton",)})
    assert torch.equal(init_tensor(spec, (14, columns[1]), **made), expected)
    assert launches.names == ["_normal"] * (1 if columns == (0, 40) else 12)


def test_a_gpu_draws_with_triton():
    for device, name in (("cuda", "triton"), ("cpu", "reference")):
        assert registry.take("philox", torch.device(device), torch.float32).name == name


@pytest.mark.parametrize("start", STARTS)
def test_normal_numbers(start, monkeypatch):
    """The reference rounds the angle to half an ulp of 2 pi, which a radius of up to 6.7 scales."""
    launches = Launches(monkeypatch, triton_impl, "_normal")
    found, expected = (torch.full((2500,), torch.nan, dtype=torch.float64) for _ in range(2))
    fill_normal(found, (11, 2**32 - 3), start=start, std=0.1, impl=triton_impl)
    fill_normal(expected, (11, 2**32 - 3), start=start, std=0.1)
    assert launches.names == ["_normal"]
    torch.testing.assert_close(found, expected, rtol=4e-15, atol=6.7 * 0.1 * 4.5e-16)
    narrow = torch.full((2503,), torch.nan)
    fill_normal(narrow[:2500], (11, 2**32 - 3), start=start, std=0.1, impl=triton_impl)
    torch.testing.assert_close(narrow[:2500], expected.float(), rtol=2**-23, atol=1e-15)
    assert narrow[2500:].isnan().all()


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("threshold", [0, 1 << 31, (1 << 32) - 1, 1 << 32])
def test_keep(start, threshold, monkeypatch):
    launches = Launches(monkeypatch, triton_impl, "_keep")
    found, expected = torch.zeros(1500, dtype=torch.bool), torch.ones(1500, dtype=torch.bool)
    fill_keep(found, (3, 4), start=start, threshold=threshold, impl=triton_impl)
    fill_keep(expected, (3, 4), start=start, threshold=threshold)
    assert launches.names == ["_keep"]
    assert torch.equal(found, expected)


def test_no_access_outside_the_tensors(monkeypatch):
    addresses = Addresses(monkeypatch)
    made_scalar = torch.Tensor.new_tensor
    monkeypatch.setattr(torch.Tensor, "new_tensor", lambda *a, **k: addresses.allow(made_scalar(*a, **k)))
    triton_impl.fill_normal(addresses.allow(torch.zeros(1500)), (1, 2), start=0, std=1.0)
    triton_impl.fill_keep(addresses.allow(torch.zeros(1500, dtype=torch.bool)), (1, 2), start=0, threshold=5)
    x = addresses.allow(torch.ones(1500))
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.empty(x.shape))
    assert dropout_triton.forward(x, p=0.5, key=(1, 2), starts=(0, 9000)).isfinite().all()
    assert addresses.num_checked >= 4 * 1500


def test_nothing_to_fill():
    assert fill_normal(torch.empty(0), (1, 2), start=0, std=1.0, impl=triton_impl).numel() == 0
    assert fill_keep(torch.empty(0, dtype=torch.bool), (1, 2), start=0, threshold=1, impl=triton_impl).numel() == 0


@pytest.mark.skipif(native.load() is None, reason="the extension was not built")
@pytest.mark.parametrize("start", STARTS)
def test_compiled_words_make_the_same_numbers(start, monkeypatch):
    compiled = fill_normal(torch.empty(70_000), (5, 6), start=start, std=1.0)
    kept = fill_keep(torch.empty(70_000, dtype=torch.bool), (5, 6), start=start, threshold=1 << 30)
    monkeypatch.setattr(native, "load", lambda: None)
    assert torch.equal(fill_normal(torch.empty(70_000), (5, 6), start=start, std=1.0), compiled)
    plain = fill_keep(torch.empty(70_000, dtype=torch.bool), (5, 6), start=start, threshold=1 << 30)
    assert torch.equal(plain, kept)


@pytest.mark.parametrize("dtype", INTERPRETED)
def test_dropout_error_rule(dtype, monkeypatch):
    launches = Launches(monkeypatch, dropout_triton, "_apply")
    assert check_op("dropout", dropout_triton, device=CPU, dtype=dtype).failures == []
    assert launches.names


def test_dropout_of_strided_runs():
    """Attention weights of two samples: runs that start apart, a transposed input and gradient."""
    x = torch.randn(8, 20, 4).permute(2, 1, 0)[:, ::2]
    options = {"key": (7, 2**31), "starts": (2**32 - 50, 10)}
    found, expected = (
        dropout(x.clone(memory_format=torch.preserve_format), 0.4, impl=impl, **options)
        for impl in (dropout_triton, dropout_reference)
    )
    assert torch.equal(found, expected)
    assert torch.equal(dropout_triton.backward(x, p=0.4, **options), found)
    assert 0.4 < (found != 0).double().mean() < 0.8
