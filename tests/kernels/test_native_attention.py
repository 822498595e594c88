"""Attention in C++, what only it has: causality, documents, long rows, weights that vanish, what it keeps."""

import math

import pytest
import torch

from megalite.kernels.attention import attention, cases, native_impl
from megalite.kernels.rope.tables import frequencies, tables
from tests.kernels.native_tools import CPU, Calls, randn

pytestmark = pytest.mark.timeout(60)
HEADS = (4, 2, 2)


def both(qkv, *, angles=None, documents=None, heads=HEADS):
    """Rows and gradient of the kernel, and those of the formula in float64."""
    leaf, wide = qkv.clone().requires_grad_(), qkv.double().requires_grad_()
    mixed = attention(leaf, heads=heads, angles=angles, documents=documents, impl=native_impl)
    truth = cases.truth(wide, *(angles or (None, None)), documents, *heads[:2])
    dmixed = randn(*mixed.shape, seed=1)
    mixed.backward(dmixed)
    truth.backward(dmixed.double())
    return (mixed.detach(), leaf.grad), (truth.detach(), wide.grad)


@pytest.mark.parametrize("simd", [0, -1], ids=["scalar", "best"])
@pytest.mark.parametrize("seq_len", [15, 16, 17, 63, 64, 65, 129])
@pytest.mark.parametrize("documents", [False, True])
def test_lengths_about_tiles_and_blocks(simd, seq_len, documents, monkeypatch):
    Calls(monkeypatch, simd=simd)
    ids = (torch.arange(seq_len)[None] + torch.tensor([[0], [5]])) // 9 if documents else None
    qkv = randn(2, seq_len, 8, 20)
    found, expected = both(qkv, documents=ids)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0.0, atol=1e-5)


def test_a_long_sequence(monkeypatch):
    """More columns than are taken at a time, in both directions; rotated."""
    calls = Calls(monkeypatch)
    angles = tables(frequencies(36, 1e4), 700, dtype=torch.float32, device=CPU)
    found, expected = both(randn(1, 700, 4, 36), angles=angles, heads=(2, 1, 1))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0.0, atol=2e-5)
    assert calls.names == ["attention", "attention"]


def test_no_position_sees_a_later_one_or_another_document(monkeypatch):
    """Bit for bit: what comes later, or stands in another document, may be anything finite, and has no gradient."""
    Calls(monkeypatch)
    qkv, other = randn(1, 50, 8, 16), 1e3 * randn(1, 50, 8, 16, seed=2)
    documents = torch.tensor([[0] * 21 + [1] * 29])
    first = attention(qkv, heads=HEADS, documents=documents, impl=native_impl)
    changed = qkv.clone()
    changed[:, :21], changed[:, 40:] = other[:, :21], other[:, 40:]
    assert torch.equal(attention(changed, heads=HEADS, documents=documents, impl=native_impl)[21:40], first[21:40])
    leaf = qkv.clone().requires_grad_()
    attention(leaf, heads=HEADS, documents=documents, impl=native_impl)[21:40].sum().backward()
    assert not leaf.grad[:, :21].any()
    assert not leaf.grad[:, 40:].any()
    assert leaf.grad[:, 21:40, 6:].all()


@pytest.mark.parametrize("scale", [30.0, 1e4])
def test_scores_far_apart(scale, monkeypatch):
    """Weights of 0 and 1: no NaN, no infinity, and the gradients of the formula."""
    Calls(monkeypatch)
    qkv = randn(1, 40, 8, 16)
    qkv[:, :, :6] *= scale**0.5
    found, expected = both(qkv)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5 * scale)


def test_weights_sum_to_one_to_the_last_places(monkeypatch):
    """The power of two is its own: v of ones comes back, and one score sweeps its whole range."""
    Calls(monkeypatch)
    qkv = torch.zeros(1, 2, 3, 16)
    qkv[0, :, 2] = torch.tensor([[1.0], [0.0]])
    for score in torch.linspace(-60.0, 0.0, 301):
        qkv[0, 1, 0, 0], qkv[0, 0, 1, 0] = 4.0 * score, 1.0
        found = attention(qkv, heads=(1, 1, 1), impl=native_impl)[1, 0].double()
        exact = torch.sigmoid(score.double())
        assert abs(found - exact) <= (4.0 - score) * 2**-23 * exact  # the score's own roundings, and some of the power
    ones = torch.ones(1, 100, 3, 16)
    ones[:, :, :2] = randn(1, 100, 2, 16)
    torch.testing.assert_close(attention(ones, heads=(1, 1, 1), impl=native_impl), torch.ones(100, 16))


def test_nan_goes_where_it_is_seen(monkeypatch):
    Calls(monkeypatch)

    def rows_with_nan(position, head):
        qkv = randn(1, 40, 3, 16)
        qkv[0, position, head, 3] = math.nan
        return attention(qkv, heads=(1, 1, 1), impl=native_impl).isnan().any(1)

    assert rows_with_nan(20, 0).nonzero().flatten().tolist() == [20]
    assert rows_with_nan(20, 1).nonzero().flatten().tolist() == list(range(20, 40))
    assert rows_with_nan(20, 2)[20:].all()
    qkv = randn(1, 40, 3, 16)
    qkv[0, 20, 1, 3] = math.nan
    leaf = qkv.requires_grad_()
    attention(leaf, heads=(1, 1, 1), impl=native_impl)[:20].sum().backward()
    assert leaf.grad[:, 20:, 0].isnan().any() or not leaf.grad[:, 20:, 0].any()


def test_keeps_the_packed_heads_and_one_number_per_row(monkeypatch):
    Calls(monkeypatch)
    qkv = randn(2, 64, 8, 32).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        attention(qkv, heads=HEADS, impl=native_impl)
    assert [tuple(x.shape) for x in kept] == [(2, 64, 8, 32), (2, 4, 64)]
    assert kept[0].data_ptr() == qkv.data_ptr()


def test_bf16_is_rounded_once(monkeypatch):
    Calls(monkeypatch)
    qkv = randn(1, 60, 8, 32).bfloat16()
    leaf = qkv.clone().requires_grad_()
    mixed = attention(leaf, heads=HEADS, impl=native_impl)
    dmixed = randn(60, 128, seed=1).bfloat16()
    mixed.backward(dmixed)
    wide = qkv.double().requires_grad_()
    truth = cases.truth(wide, None, None, None, 4, 2)
    truth.backward(dmixed.double())
    for found, exact in ((mixed.detach(), truth.detach()), (leaf.grad, wide.grad)):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": (4, 3, 1)}, "must be N, K and K with K dividing N"),
        ({"heads": (4, 4)}, "are not q, k and v of qkv"),
        ({"heads": (8, 0, 0)}, "must be N, K and K"),
        ({"heads": HEADS, "angles": (torch.ones(4, 3), torch.ones(4, 3))}, "do not fit qkv"),
        ({"heads": HEADS, "documents": torch.zeros(1, 4)}, r"documents \(1, 4\) must be \(2, 4\)"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        attention(randn(2, 4, 8, 6 if "angles" not in arguments else 8), impl=native_impl, **arguments)
