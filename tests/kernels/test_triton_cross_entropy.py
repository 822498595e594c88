"""Cross entropy in Triton, in the interpreter: the error rule, hard rows, slices of a vocabulary on two ranks."""

import pytest
import torch
import torch.nn.functional as F

from megalite.batch import IGNORE
from megalite.kernels.check import check_op
from megalite.kernels.cross_entropy import cross_entropy, reference, triton_impl
from tests.kernels.addresses import Addresses
from tests.kernels.triton_tools import CPU, INTERPRETED, Launches, far_rows, run_slices


def both(logits, targets, **options):
    """(loss, gradient) by Triton and by the reference, for upstream gradients 1, 2, ..."""
    found = []
    for impl in (triton_impl, reference):
        own = logits.clone().requires_grad_()
        loss = cross_entropy(own * 1.0, targets, impl=impl, **options)
        loss.backward(torch.arange(1.0, len(targets) + 1, dtype=loss.dtype))
        found += [loss.detach(), own.grad]
    return found


@pytest.mark.parametrize("dtype", INTERPRETED)
def test_error_rule(dtype, monkeypatch):
    launches = Launches(monkeypatch, triton_impl, "_statistics", "_gradient")
    assert check_op("cross_entropy", triton_impl, device=CPU, dtype=dtype).failures == []
    assert set(launches.names) == {"_statistics", "_gradient"}


def test_several_blocks_and_poisoned_padding(monkeypatch):
    monkeypatch.setattr(triton_impl, "STATISTICS_BLOCK", 16)
    monkeypatch.setattr(triton_impl, "GRADIENT_BLOCK", 16)
    logits = 5.0 * torch.randn(7, 83, generator=torch.Generator().manual_seed(0))
    logits[:, 77:] = torch.nan
    targets = torch.tensor([0, 76, IGNORE, 15, 16, 40, 3])
    loss, grad, *_ = both(logits, targets, num_valid=77)
    plain = logits[:, :77].double().requires_grad_()
    expected = F.cross_entropy(plain, targets, reduction="none")
    expected.backward(torch.arange(1.0, 8.0, dtype=torch.float64))
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(grad[:, :77].double(), plain.grad, rtol=1e-5, atol=1e-6)
    assert not grad[:, 77:].any()


def test_no_valid_target_gives_zero_loss_and_gradient():
    loss, grad, *_ = both(torch.full((3, 20), 1e4), torch.full((3,), IGNORE))
    assert not loss.any()
    assert not grad.any()


def test_peaked_logits_keep_small_losses():
    """A loss of 1e-4 beside logits of 1e4, where fp32 has steps of 1e-3."""
    logits = torch.full((2, 40), 1e4 - 13.0)
    logits[:, 5] = 1e4
    loss, grad, *_ = both(logits, torch.tensor([5, 6]))
    small = torch.tensor(39 * torch.e**-13.0, dtype=torch.float64).log1p().item()
    expected = torch.tensor([small, 13.0 + small], dtype=torch.float64)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=2**-23)  # the sum, 1 + 9e-5, is rounded
    assert grad[0, 5] < 0 < grad[0, 6]
    torch.testing.assert_close(grad.sum(1), torch.zeros(2), rtol=0, atol=1e-6)


def test_masked_logits_at_the_front(monkeypatch):
    """The first block holds nothing but -inf, so the running maximum starts as -inf."""
    monkeypatch.setattr(triton_impl, "STATISTICS_BLOCK", 8)
    logits = torch.randn(2, 24)
    logits[:, :9] = -torch.inf
    loss, grad, expected, expected_grad = both(logits, torch.tensor([9, 23]))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grad, expected_grad)
    assert torch.isfinite(loss).all()
    assert not grad[:, :9].any()


def test_nan_reaches_the_loss():
    logits = torch.zeros(2, 10)
    logits[1, 3] = torch.nan
    loss, *_ = both(logits, torch.tensor([0, 0]))
    assert torch.isfinite(loss[0])
    assert torch.isnan(loss[1])


def test_rows_past_2_to_the_31():
    rows = far_rows(12)
    rows.copy_(torch.randn(3, 12))
    targets = torch.tensor([1, 2, 3])
    expected, expected_grad = both(rows.float().contiguous(), targets)[2:]
    statistics = triton_impl.statistics(rows, targets, start=0, num_valid=12)
    loss = statistics[1].log() + statistics[0] - statistics[2]
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    triton_impl.backward(torch.arange(1.0, 4.0), rows, statistics[:2], targets, start=0, num_valid=12)
    torch.testing.assert_close(rows.float(), expected_grad, rtol=1e-3, atol=1e-4)


def test_columns_that_are_not_contiguous():
    logits, targets = torch.randn(6, 4).t(), torch.tensor([0, 5, 2, IGNORE])
    found = triton_impl.statistics(logits, targets, start=0, num_valid=6)
    torch.testing.assert_close(found, reference.statistics(logits, targets, start=0, num_valid=6))
    with pytest.raises(ValueError, match=r"strides \(1, 4\)"):
        triton_impl.backward(torch.ones(4), logits, found[:2], targets, start=0, num_valid=6)


@pytest.mark.parametrize("impl", [triton_impl, reference])
def test_slices_on_two_ranks_equal_the_whole(impl):
    """13 words on two ranks of 8 columns: rank 1 has padding, and each rank sees targets of the other."""
    logits = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    logits[:, 13:] = 30.0
    targets, upstream = torch.tensor([0, 7, 8, 12, IGNORE]), torch.tensor([1.0, 2.0, 0.5, 3.0, 9.0])

    def rank_loss(rank, reduce):
        own = logits[:, 8 * rank : 8 * rank + 8].clone().requires_grad_()
        start, valid = 8 * rank, (8, 5)[rank]
        return own, cross_entropy(own * 1.0, targets, start=start, num_valid=valid, reduce=reduce, impl=impl)

    (left, loss), (right, other) = run_slices(2, rank_loss)
    assert torch.equal(loss, other)
    for total in (loss, other):
        total.backward(upstream)
    whole = logits[:, :13].clone().requires_grad_()
    expected = F.cross_entropy(whole, targets, reduction="none")
    expected.backward(upstream)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.cat([left.grad, right.grad], 1)[:, :13], whole.grad)
    assert not right.grad[:, 5:].any()


def test_no_access_outside_the_tensors(monkeypatch):
    """Rows with gaps between them, several blocks, targets of other slices on both sides and in the padding."""
    addresses = Addresses(monkeypatch)
    monkeypatch.setattr(triton_impl, "STATISTICS_BLOCK", 16)
    monkeypatch.setattr(triton_impl, "GRADIENT_BLOCK", 16)
    plain = torch.randn(5, 37, generator=torch.Generator().manual_seed(0))
    logits, own = addresses.bordered(plain), plain.clone()
    targets = addresses.allow(torch.tensor([2, 3, 36, 39, 100]))
    at = {"start": 3, "num_valid": 33}
    statistics = addresses.allow(triton_impl.statistics(logits, targets, **at))
    torch.testing.assert_close(statistics, reference.statistics(own, targets, **at))
    assert statistics[2].tolist() == [0.0, plain[1, 0].item(), 0.0, 0.0, 0.0]
    dloss = addresses.allow(torch.ones(5))
    found = triton_impl.backward(dloss, logits, statistics[:2], targets, **at)
    torch.testing.assert_close(found, reference.backward(dloss, own, statistics[:2], targets, **at))
    assert not found[:, 33:].any()
    assert addresses.num_checked > 3 * plain.numel()


def test_a_slice_of_padding_only():
    logits, targets = torch.full((2, 4), 9.0), torch.tensor([0, 1])
    for impl in (triton_impl, reference):
        found = impl.statistics(logits, targets, start=8, num_valid=0)
        assert found.tolist() == [[-torch.inf] * 2, [0.0] * 2, [0.0] * 2]
        grad = impl.backward(torch.ones(2), logits.clone(), torch.ones(2, 2), targets, start=8, num_valid=0)
        assert not grad.any()
