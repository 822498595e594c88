"""Philox4x32-10: the published known answers, statistics, and independence of how a tensor is cut."""

import math

import pytest
import torch

from megalite.kernels.dropout import dropout
from megalite.kernels.dropout.mask import keep_threshold
from megalite.kernels.philox import fill_keep, fill_normal, stream_key
from megalite.kernels.philox import reference as philox_reference
from megalite.kernels.philox.reference import philox4x32, words

ONES = 0xFFFFFFFF
KNOWN = [  # Random123, kat_vectors: philox4x32 10
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter, key, expected):
    assert philox4x32(counter, key) == expected
    tensors = tuple(torch.tensor([word]) for word in counter)
    assert tuple(int(word) for word in philox4x32(tensors, key)) == expected


def test_an_element_uses_its_index_as_counter():
    index = 5 * 2**32 + 7
    expected = philox4x32((7, 5, 0, 0), (11, 13))[:2]
    assert tuple(int(word) for word in words(torch.tensor(index), (11, 13))) == expected


def test_keys_are_stable_and_differ():
    assert stream_key(1234, "init", "embedding.word.weight") == (0xCE1C8E6F, 0x402B0F5F)
    keys = {stream_key(seed, name) for seed in range(50) for name in ("a", "b", "a1", "1a")}
    assert len(keys) == 200
    assert stream_key(1, "ab", "c") != stream_key(1, "a", "bc")
    assert stream_key(1, "1") != stream_key(11, "")


def test_normal_numbers_are_standard():
    x = fill_normal(torch.empty(200_000, dtype=torch.float64), (1, 2), start=0, std=1.0)
    n = x.numel()
    assert abs(x.mean()) < 5 / math.sqrt(n)
    assert abs(x.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((x**4).mean() - 3) < 5 * math.sqrt(96 / n)
    assert abs((x[1:] * x[:-1]).mean()) < 5 / math.sqrt(n)
    below = (x < 1.0).double().mean()
    assert abs(below - 0.841344746) < 5 * math.sqrt(0.1335 / n)


def test_any_cut_draws_the_same(monkeypatch):
    whole = fill_normal(torch.empty(1000), (3, 4), start=2**32 - 500, std=0.5)
    cut = torch.empty(300)
    fill_normal(cut, (3, 4), start=2**32 - 500 + 450, std=0.5)
    assert torch.equal(cut, whole[450:750])
    monkeypatch.setitem(philox_reference.PIECE, "cpu", 7)
    assert torch.equal(fill_normal(torch.empty(1000), (3, 4), start=2**32 - 500, std=0.5), whole)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999])
def test_threshold_is_that_of_the_uniform_number(p):
    threshold = keep_threshold(p)
    assert (threshold + 0.5) * 2.0**-32 >= p
    assert threshold == 0 or (threshold - 0.5) * 2.0**-32 < p
    kept = fill_keep(torch.empty(100_000, dtype=torch.bool), (5, 6), start=0, threshold=threshold).double().mean()
    assert abs(kept - (1 - p)) <= 5 * math.sqrt(p * (1 - p) / 100_000)


def test_dropout_forward_and_backward_use_one_mask():
    x = torch.rand(64, 32, dtype=torch.float64).add_(0.5).requires_grad_()
    y = dropout(x, 0.3, key=(7, 8), starts=(0,))
    kept = y != 0
    assert torch.equal(y, torch.where(kept, x * (1.0 / 0.7), 0.0))
    y.backward(torch.ones_like(y))
    assert torch.equal(x.grad, kept.double() * (1.0 / 0.7))


def test_dropout_runs_start_where_they_are_told():
    x = torch.ones(6, 10)
    whole = dropout(x, 0.5, key=(7, 8), starts=(0,))
    parts = dropout(torch.cat([x[4:], x[:2]]), 0.5, key=(7, 8), starts=(40, 0))
    assert torch.equal(parts, torch.cat([whole[4:], whole[:2]]))
    assert not torch.equal(whole, dropout(x, 0.5, key=(7, 9), starts=(0,)))


def test_dropout_of_zero_is_the_input():
    x = torch.ones(3, requires_grad=True)
    assert dropout(x, 0.0, key=(0, 0), starts=(0,)) is x
    with pytest.raises(ValueError, match="must be in"):
        dropout(x, 1.0, key=(0, 0), starts=(0,))
