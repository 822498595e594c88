"""AdamW and the sum of squares in Triton, in the interpreter."""

import pytest
import torch

from megalite.kernels.adamw import cases as adamw_cases
from megalite.kernels.adamw import reference
from megalite.kernels.adamw import triton_impl as adamw
from megalite.kernels.adamw.hyper import Hyper
from megalite.kernels.check import check_op
from megalite.kernels.grad_norm import triton_impl as grad_norm
from tests.kernels.addresses import Addresses
from tests.kernels.triton_tools import CPU, Launches


def case(num):
    return next(c for c in adamw_cases.CASES if c.name == str(num) and c.dtype == torch.float32).inputs()[0]


@pytest.mark.parametrize("num", [0, 1, 17, 4099])
def test_adamw_error_rule(num, monkeypatch):
    """At most twice the reference's error against float64, and a few roundings of fp32."""
    launches = Launches(monkeypatch, adamw, "_step")
    tensors = case(num)
    ours, theirs = (adamw_cases.call(*tensors, impl=impl) for impl in (adamw, reference))
    truth = adamw_cases.truth(*(t.detach().double() for t in tensors))
    for name, exact in zip(("main", "exp_avg", "exp_avg_sq"), truth, strict=True):
        near, far = ((getattr(outcome, name) - exact).abs() for outcome in (theirs, ours))
        assert (far <= 2 * near + 4 * 2**-24 * exact.abs() + 2**-24 * 3e-3).all(), name
    assert launches.names == ["_step"] * (num > 0)


def test_adamw_over_100_steps():
    """Against float64: 1e-5 of the value and one unit in the last place, as the C++ and CUDA ones."""
    generator = torch.Generator().manual_seed(0)
    main = torch.randn(1500, generator=generator)
    start, wide = main.clone(), main.double()
    moments, wide_moments = [torch.zeros(1500) for _ in range(2)], [torch.zeros(1500).double() for _ in range(2)]
    for step in range(1, 101):
        hyper = Hyper(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=step)
        grad = torch.randn(1500, generator=generator)
        adamw.step(main, grad, *moments, hyper=hyper, scale=torch.tensor(0.5))
        wide, *wide_moments = adamw_cases.truth(wide, grad.double(), *wide_moments, scale=0.5, hyper=hyper)
    assert (main - start).abs().min() > 1e-4
    torch.testing.assert_close(main.double(), wide, rtol=1e-5, atol=2e-6)


def test_adamw_reads_the_scale_from_a_tensor_and_leaves_the_gradient():
    with torch.no_grad():
        main, grad, exp_avg, exp_avg_sq = case(100)
        others = [t.clone() for t in (main, grad, exp_avg, exp_avg_sq)]
        before = grad.clone()
        adamw.step(main, grad, exp_avg, exp_avg_sq, hyper=adamw_cases.HYPER, scale=0.25)
        adamw.step(*others, hyper=adamw_cases.HYPER, scale=torch.tensor(0.25))
    assert torch.equal(grad, before)
    for ours, theirs in zip((main, exp_avg, exp_avg_sq), (others[0], *others[2:]), strict=True):
        assert torch.equal(ours, theirs)


def test_adamw_writes_the_copy_and_nothing_behind_the_tail():
    """fp16 stands in for bf16, which the interpreter truncates."""
    with torch.no_grad():
        tensors = case(100)
        padded = [torch.cat([t, torch.full((30,), 77.0)]) for t in tensors]
        copy = torch.full((130,), 77.0).half()
        adamw.step(*(t[:100] for t in padded), hyper=adamw_cases.HYPER, scale=1.0, out_copy=copy[:100])
    assert torch.equal(copy[:100], padded[0][:100].half())
    assert not torch.equal(padded[0][:100], tensors[0])
    assert all((t[100:] == 77.0).all() for t in (*padded, copy))


def test_no_access_outside_the_tensors(monkeypatch):
    addresses = Addresses(monkeypatch)
    tensors = [addresses.allow(t.detach()) for t in case(100)]
    copy, scale = (addresses.allow(t) for t in (torch.zeros(100).half(), torch.ones(())))
    adamw.step(*tensors, hyper=adamw_cases.HYPER, scale=scale, out_copy=copy)
    grad_norm.square_sum(tensors[0])
    assert addresses.num_checked >= 900


def test_adamw_refuses_other_dtypes():
    with pytest.raises(ValueError, match="computes in fp32"):
        adamw.step(*(torch.ones(3, dtype=torch.float64) for _ in range(4)), hyper=adamw_cases.HYPER)


def test_square_sum_error_rule(monkeypatch):
    launches = Launches(monkeypatch, grad_norm, "_partial")
    assert check_op("grad_norm", grad_norm, device=CPU, dtype=torch.float32).failures == []
    assert launches.names


def test_square_sum_in_several_rounds(monkeypatch):
    """More elements than one round of all programs; large numbers do not swallow small ones."""
    monkeypatch.setattr(grad_norm, "BLOCK", 16)
    monkeypatch.setattr(grad_norm, "MAX_PROGRAMS", 3)
    grad = torch.randn(333, generator=torch.Generator().manual_seed(0))
    grad[7] = 1e6
    found = grad_norm.square_sum(grad)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, grad.double().square().sum(), rtol=1e-14, atol=0.0)


def test_square_sum_of_infinity_and_nan():
    assert grad_norm.square_sum(torch.tensor([1.0, torch.inf])).isinf()
    assert grad_norm.square_sum(torch.tensor([1.0, torch.nan])).isnan()
    assert grad_norm.square_sum(torch.empty(0)) == 0.0
