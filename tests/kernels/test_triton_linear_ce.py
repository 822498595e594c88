"""Linear cross entropy: reference (recomputed and in one pass) and Triton, per-token gradients, slices, peak memory."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from megalite.batch import IGNORE
from megalite.kernels.check import check_op
from megalite.kernels.cross_entropy import triton_impl as cross_entropy_triton
from megalite.kernels.linear_cross_entropy import chunks, kept, linear_cross_entropy, one_pass, reference, triton_impl
from megalite.kernels.wgrad import reference as wgrad
from megalite.kernels.wgrad import triton_impl as wgrad_triton
from tests.kernels.triton_tools import CPU, INTERPRETED, Launches, run_slices

IMPLS = {"reference": reference, "triton": triton_impl}


def inputs(rows, width, columns, dtype=torch.float64):
    """x, weight, targets with every third row skipped, and an upstream gradient that differs per token."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(columns, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(columns, (rows,), generator=generator)
    targets[::3] = IGNORE
    return x, weight, targets, torch.arange(float(rows), dtype=torch.promote_types(dtype, torch.float32))


def plain(x, weight, targets, upstream):
    """loss, dx, dweight by torch."""
    x, weight = (t.detach().clone().requires_grad_() for t in (x, weight))
    loss = F.cross_entropy(F.linear(x, weight), targets, reduction="none", ignore_index=IGNORE)
    loss.backward(upstream)
    return loss.detach(), x.grad, weight.grad


@pytest.fixture
def small_chunks(monkeypatch):
    """Seven rows at a time, so that the last chunk is shorter; no logits are kept."""
    monkeypatch.setattr(kept, "ELEMENTS", 0)
    monkeypatch.setattr(chunks, "MIN_ROWS", 7)
    monkeypatch.setattr(chunks, "CHUNK", 1)


@pytest.fixture
def recomputes(monkeypatch):
    """Counts how often the logits of all rows are made."""
    seen = []

    def counted(x, weight, original=chunks.logits_of):
        seen.append(tuple(x.shape))
        return original(x, weight)

    monkeypatch.setattr(chunks, "logits_of", counted)
    return seen


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_error_of_the_reference(dtype):
    assert check_op("linear_cross_entropy", reference, device=CPU, dtype=dtype).failures == []


@pytest.mark.parametrize("dtype", INTERPRETED)
def test_error_rule(dtype, monkeypatch):
    launches = Launches(monkeypatch, cross_entropy_triton, "_statistics", "_gradient")
    assert check_op("linear_cross_entropy", triton_impl, device=CPU, dtype=dtype).failures == []
    assert set(launches.names) == {"_statistics", "_gradient"}


@pytest.mark.parametrize("width", [8, 3])
def test_gradcheck(width, small_chunks):
    """Width 3 of 18 rows is made in one pass, width 8 is not; gradcheck's upstream gradients differ per token."""
    x, weight, targets, _ = inputs(18, width, 5)
    assert one_pass.pays(x, weight) == (width == 3)
    assert torch.autograd.gradcheck(lambda a, b: linear_cross_entropy(a, b, targets), (x, weight))


@pytest.mark.parametrize("name", IMPLS)
@pytest.mark.parametrize("width", [16, 4])
def test_upstream_gradient_per_token(name, width, small_chunks, recomputes):
    """The first token is skipped and has upstream 0, so its number can't stand for all."""
    x, weight, targets, upstream = inputs(23, width, 11, torch.float32)
    expected = plain(x, weight, targets, upstream)
    loss = linear_cross_entropy(x, weight, targets, impl=IMPLS[name])
    loss.backward(upstream)
    for found, truth in zip((loss.detach(), x.grad, weight.grad), expected, strict=True):
        torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-5 * truth.abs().max().item())
    assert len(recomputes) == 2


def test_one_pass_makes_the_logits_once_for_equal_upstream_gradients(small_chunks, recomputes):
    """What a trainer sends: 1/count; skipped tokens may hold anything."""
    x, weight, targets, _ = inputs(23, 4, 11)
    upstream = torch.where(targets == IGNORE, torch.nan, 0.125)
    expected = plain(x, weight, targets, torch.full_like(upstream, 0.125))
    loss = linear_cross_entropy(x, weight, targets)
    loss.backward(upstream.nan_to_num(7.0))
    assert recomputes == [(23, 4)]
    for found, truth in zip((loss.detach(), x.grad, weight.grad), expected, strict=True):
        torch.testing.assert_close(found, truth)


@pytest.mark.parametrize("width", [16, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradient_goes_into_the_main_gradient(width, dtype, small_chunks):
    x, weight, targets, upstream = inputs(40, width, 11, dtype)
    upstream = torch.full_like(upstream, 0.25) if width == 4 else upstream
    *_, dweight = plain(x.double(), weight.double(), targets, upstream.double())
    weight.main_grad = torch.full(weight.shape, 3.0)
    linear_cross_entropy(x, weight, targets).backward(upstream)
    assert weight.grad is None
    error = (weight.main_grad - 3.0 - dweight).norm() / dweight.norm()
    assert error <= {torch.float32: 5e-6, torch.bfloat16: 1e-2}[dtype]
    assert x.grad.dtype == dtype


def test_without_gradient_the_loss_is_the_same():
    x, weight, targets, upstream = inputs(16, 4, 9)
    expected, *_ = plain(x, weight, targets, upstream)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(x, weight, targets), expected)
    frozen = linear_cross_entropy(x.detach(), weight.detach(), targets)
    torch.testing.assert_close(frozen, expected)
    assert not frozen.requires_grad


def test_only_one_of_the_two_wants_a_gradient(monkeypatch):
    x, weight, targets, upstream = inputs(16, 4, 9)
    _, dx, dweight = plain(x, weight, targets, upstream)
    with monkeypatch.context() as patch:
        patch.setattr(wgrad, "accumulate", lambda *_: pytest.fail("a frozen weight needs no gradient"))
        linear_cross_entropy(x, weight.detach(), targets).backward(upstream)
    torch.testing.assert_close(x.grad, dx)
    linear_cross_entropy(x.detach(), weight, targets).backward(upstream)
    torch.testing.assert_close(weight.grad, dweight)


@pytest.mark.parametrize("name", IMPLS)
@pytest.mark.parametrize("width", [16, 4])
def test_all_tokens_skipped(name, width):
    x, weight, _, upstream = inputs(16, width, 9, torch.float32)
    loss = linear_cross_entropy(x, weight, torch.full((16,), IGNORE), impl=IMPLS[name])
    loss.backward(upstream)
    assert not any(t.any() for t in (loss, x.grad, weight.grad))


@pytest.mark.parametrize("main", [True, False], ids=["main_grad", "autograd"])
def test_few_logits_are_kept_and_made_again_for_a_second_backward(main, recomputes):
    x, weight, targets, upstream = inputs(12, 6, 11)
    expected = plain(x, weight, targets, upstream)
    if main:
        weight.main_grad = torch.zeros(11, 6, dtype=torch.float64)
    loss = linear_cross_entropy(x, weight, targets)
    for times_made in (0, 1):
        loss.backward(upstream, retain_graph=True)
        assert len(recomputes) == times_made
        found = weight.main_grad if main else weight.grad
        for value, truth in zip((loss.detach(), x.grad, found), expected, strict=True):
            torch.testing.assert_close(value, truth)
        x.grad = weight.grad = None
        if main:
            weight.main_grad.zero_()


def test_logits_are_kept_up_to_the_bound(monkeypatch):
    x, weight, *_ = inputs(12, 6, 11)
    monkeypatch.setattr(kept, "ELEMENTS", 12 * 11)
    assert kept.pays(x, weight)
    monkeypatch.setattr(kept, "ELEMENTS", 12 * 11 - 1)
    assert not kept.pays(x, weight)


@pytest.mark.parametrize("name", [*IMPLS, "kept"])
def test_slices_on_two_ranks_equal_the_whole(name, request):
    """13 words on two ranks of 8 rows of weight; dx is a partial sum; padding must not matter."""
    if name != "kept":
        request.getfixturevalue("small_chunks")
    x, weight, targets, upstream = inputs(20, 6, 13, torch.float32)
    padded = torch.cat([weight.detach(), torch.full((3, 6), 50.0)])

    def rank_loss(rank, reduce):
        own = x.detach().clone().requires_grad_(), padded[8 * rank : 8 * rank + 8].clone().requires_grad_()
        options = {"start": 8 * rank, "num_valid": (8, 5)[rank], "reduce": reduce, "impl": IMPLS.get(name, reference)}
        return *own, linear_cross_entropy(*own, targets, **options)

    ranks = run_slices(2, rank_loss)
    for *_, loss in ranks:
        loss.backward(upstream)
    loss, dx, dweight = plain(x, weight, targets, upstream)
    assert torch.equal(ranks[0][2], ranks[1][2])
    torch.testing.assert_close(ranks[0][2].detach(), loss)
    torch.testing.assert_close(ranks[0][0].grad + ranks[1][0].grad, dx, rtol=1e-5, atol=1e-5)
    found = torch.cat([weight.grad for _, weight, _ in ranks])
    torch.testing.assert_close(found[:13], dweight, rtol=1e-5, atol=1e-5)
    assert not found[13:].any()


@pytest.mark.parametrize(
    ("targets", "message"),
    [(torch.zeros(3, dtype=torch.int64), r"must be \(2,\) int64"), (torch.zeros(2, dtype=torch.int32), "int32")],
)
def test_wrong_targets_are_refused(targets, message):
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(torch.ones(2, 4), torch.ones(5, 4), targets)


def test_widths_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"rows of 4 do not fit weight \(5, 3\)"):
        linear_cross_entropy(torch.ones(2, 4), torch.ones(5, 3), torch.zeros(2, dtype=torch.int64))


PEAK = """
import re, sys, torch
import torch.nn.functional as F
from megalite.kernels.linear_cross_entropy import linear_cross_entropy
torch.set_num_threads(1)
status = lambda: open("/proc/self/status").read()
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", status())[1])  # ru_maxrss would begin at the parent's
M, V, D = 4096, 32000, 64
x, w = torch.randn(M, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
t = torch.randint(V, (M,))
fused = lambda x, w, t: linear_cross_entropy(x, w, t)
logits = lambda x, w, t: F.cross_entropy(F.linear(x, w), t, reduction="none")
step = fused if sys.argv[1] == "fused" else logits
step(x[:8], w, t[:8]).sum().backward()
x.grad = w.grad = None
before = peak()
step(x, w, t).backward(torch.full((M,), 1 / M))
print(peak() - before)
"""


def test_peak_memory_is_a_quarter_of_logits_and_cross_entropy():
    peaks = {}
    for way in ("fused", "logits"):
        done = subprocess.run(
            [sys.executable, "-c", PEAK, way], capture_output=True, text=True, timeout=120, check=True
        )
        peaks[way] = int(done.stdout)
    assert peaks["logits"] * 1024 >= 2 * 4096 * 32000 * 4, "the measurement sees logits and their gradient"
    assert peaks["fused"] <= peaks["logits"] / 4, peaks


class CountedWgrad:
    """An implementation of kernels/wgrad that counts."""

    def __init__(self):
        self.rows = []

    def accumulate(self, main, dy, x):
        self.rows.append(x.shape[0])
        wgrad.accumulate(main, dy, x)


@pytest.mark.parametrize("path", ["one_pass", "reference", "triton"])
@pytest.mark.parametrize("main", [True, False], ids=["main_grad", "autograd"])
def test_the_weight_gradient_is_added_up_by_what_was_chosen(path, main, small_chunks):
    counted = CountedWgrad()
    x, weight, targets, upstream = inputs(40, 8, 30, torch.float32)
    if path == "one_pass":
        upstream = torch.full_like(upstream, 0.5)
    else:
        x, targets, upstream = x[:20].detach().requires_grad_(), targets[:20], upstream[:20]
    assert one_pass.pays(x, weight) == (path == "one_pass")
    if main:
        weight.main_grad = torch.ones(30, 8)
    impl = IMPLS.get(path, reference)
    linear_cross_entropy(x, weight, targets, impl=impl, wgrad=counted).backward(upstream)
    assert counted.rows == [7] * (len(x) // 7) + [len(x) % 7]
    expected = plain(x, weight, targets, upstream)[2]
    found = weight.main_grad - 1.0 if main else weight.grad
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_head_s_weight_gradient_in_triton(monkeypatch):
    """kernels.wgrad=triton reaches the head: one launch per chunk."""
    launches = Launches(monkeypatch, wgrad_triton, "_accumulate")
    x, weight, targets, upstream = inputs(20, 8, 30, torch.float32)
    weight.main_grad = torch.zeros(30, 8)
    linear_cross_entropy(x, weight, targets, impl=triton_impl, wgrad=wgrad_triton).backward(upstream)
    assert launches.names == ["_accumulate"]
    torch.testing.assert_close(weight.main_grad, plain(x, weight, targets, upstream)[2], rtol=1e-4, atol=1e-5)
