"""Rotary embedding in Triton, in the interpreter: the error rule, masks, strides, heads that pass, far samples."""

import pytest
import torch

from megalite.kernels.check import check_op
from megalite.kernels.rope import reference, triton_impl
from megalite.kernels.rope.tables import frequencies, tables
from tests.kernels.addresses import Addresses
from tests.kernels.triton_tools import CPU, INTERPRETED, Launches


def inputs(shape, dtype=torch.float64):
    """qkv (B, S, heads, H), cos, sin."""
    compute = torch.promote_types(dtype, torch.float32)
    qkv = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    return qkv, *tables(frequencies(shape[3], 100.0), shape[1], dtype=compute, device=CPU)


@pytest.mark.parametrize("dtype", [torch.float64, *INTERPRETED])
def test_error_rule(dtype, monkeypatch):
    launches = Launches(monkeypatch, triton_impl, "rope_rotate")
    outcome = check_op("rope", triton_impl, device=CPU, dtype=dtype)
    assert outcome.failures == []
    assert launches.names == ["rope_rotate"] * 2 * outcome.num_cases  # one launch for q and k, forward and backward


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("shape", "rotated"), [((1, 1, 1, 2), 1), ((2, 3, 5, 6), 4), ((2, 3, 8, 8), 8)])
def test_touches_only_its_heads(direction, shape, rotated, monkeypatch):
    """Every mask: groups of heads and pairs that end beyond the token, gaps of NaN, poisoned results."""
    monkeypatch.setattr(triton_impl, "MAX_PAIRS", 8)
    qkv, cos, sin = inputs(shape)
    expected = getattr(reference, direction)(qkv, cos, sin, rotated)
    launches = Launches(monkeypatch, triton_impl, "rope_rotate")
    addresses = Addresses(monkeypatch)
    qkv, cos, sin = addresses.bordered(qkv), addresses.allow(cos), addresses.allow(sin)
    found = getattr(triton_impl, direction)(qkv, cos, sin, rotated)
    assert addresses.num_checked > 0
    assert launches.names == ["rope_rotate"]
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("dims", [(0, 2, 1, 3), (1, 0, 2, 3), (0, 1, 3, 2)], ids=["heads", "samples", "columns"])
def test_dims_in_any_order(dims):
    """Laid out by heads, by samples within positions, or by columns; a new contiguous tensor comes out."""
    qkv, cos, sin = inputs((2, 3, 4, 6))
    back = [dims.index(i) for i in range(4)]
    strided = qkv.permute(dims).contiguous().permute(back)
    assert not strided.is_contiguous()
    found = triton_impl.forward(strided, cos, sin, 3)
    assert found.is_contiguous()
    torch.testing.assert_close(found, reference.forward(qkv, cos, sin, 3), rtol=1e-14, atol=1e-15)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # inf - inf, which is not selected
def test_other_heads_pass_bit_for_bit():
    qkv, cos, sin = inputs((1, 4, 5, 6), torch.float16)
    qkv[0, 1, 3:] = torch.inf
    before = qkv.clone()
    found = triton_impl.forward(qkv, cos, sin, 3)
    assert torch.equal(found[:, :, 3:], before[:, :, 3:])
    assert torch.equal(qkv, before)
    assert torch.equal(triton_impl.forward(qkv, cos, sin, 0), before)


def test_backward_turns_back():
    qkv, cos, sin = inputs((2, 5, 3, 10))
    turned = triton_impl.forward(qkv, cos, sin, 2)
    assert not torch.allclose(turned, qkv)
    torch.testing.assert_close(triton_impl.backward(turned, cos, sin, 2), qkv, rtol=1e-14, atol=1e-15)


def test_no_samples():
    qkv, cos, sin = inputs((0, 3, 2, 4))
    assert triton_impl.forward(qkv, cos, sin, 1).shape == (0, 3, 2, 4)


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["samples", "positions", "heads"])
def test_far_apart(dim, monkeypatch):
    """The last sample, position or head starts 2^31 elements after the first: a 32-bit offset would wrap."""
    shape = [1, 1, 1, 4]
    shape[dim] = 3
    qkv, cos, sin = inputs(shape, torch.float16)
    strides = [4, 4, 4, 1]
    strides[dim] = 1 << 30
    far = torch.empty((1 << 31) + 4, dtype=torch.float16).as_strided(shape, strides).copy_(qkv)
    addresses = Addresses(monkeypatch)
    found = triton_impl.forward(*(addresses.allow(t) for t in (far, cos, sin)), 2)
    torch.testing.assert_close(found, reference.forward(qkv, cos, sin, 2), rtol=2**-10, atol=2**-14)
