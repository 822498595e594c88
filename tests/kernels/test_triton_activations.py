"""SwiGLU, GELU and bias-GELU in Triton, in the interpreter: the error rule, masks, strides, tails, far rows."""

import pytest
import torch

from megalite.kernels.check import check_op
from megalite.kernels.gelu import bias_gelu
from megalite.kernels.gelu import cases as gelu_cases
from megalite.kernels.gelu import reference as gelu_reference
from megalite.kernels.gelu import triton_impl as gelu_triton
from megalite.kernels.swiglu import reference as swiglu_reference
from megalite.kernels.swiglu import triton_impl as swiglu_triton
from tests.kernels.addresses import Addresses
from tests.kernels.triton_tools import CPU, INTERPRETED, Launches, far_rows

pytestmark = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
"""exp of the far left tail is inf, and 1 / (1 + inf) the 0 that is wanted."""
IMPLS = {"swiglu": (swiglu_triton, swiglu_reference), "gelu": (gelu_triton, gelu_reference)}
OPS = {"swiglu": "swiglu", "gelu": "gelu", "bias_gelu": "gelu"}
each_op = pytest.mark.parametrize("op", OPS)


def randn(*shapes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [(2.0 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype) for shape in shapes]


def run(op, impl, x, bias, dy):
    """All results of forward and backward."""
    if op == "bias_gelu":
        return [impl.forward_bias(x, bias), *impl.backward_bias(dy, x, bias)]
    return [impl.forward(x), impl.backward(dy, x)]


def inputs(op, rows, width, dtype=torch.float64):
    """x, bias, dy."""
    return randn((rows, 2 * width if op == "swiglu" else width), (width,), (rows, width), dtype=dtype)


def assert_equal(found, expected, **tolerance):
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(one, other, **tolerance, msg=lambda m, i=i: f"result {i}: {m}")


def launches_of(monkeypatch, op):
    name = OPS[op]
    return Launches(monkeypatch, IMPLS[name][0], f"{name}_forward", f"{name}_backward")


@pytest.mark.parametrize("op", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float64, *INTERPRETED])
def test_error_rule(op, dtype, monkeypatch):
    launches = launches_of(monkeypatch, op)
    outcome = check_op(op, IMPLS[op][0], device=CPU, dtype=dtype)
    assert outcome.failures == []
    assert outcome.num_cases >= 5
    assert set(launches.names) == {f"{op}_forward", f"{op}_backward"}


@each_op
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (9, 37), (4, 16), (6, 48)])
def test_touches_only_its_rows(op, rows, width, monkeypatch):
    """Every mask: rows with gaps of NaN between them, several blocks that end beyond the row, poisoned results."""
    impl, reference = IMPLS[OPS[op]]
    monkeypatch.setattr(impl, "MAX_BLOCK", 16)
    x, bias, dy = inputs(op, rows, width)
    expected = run(op, reference, x, bias, dy)
    launches = launches_of(monkeypatch, op)
    addresses = Addresses(monkeypatch)
    found = run(op, impl, addresses.bordered(x), addresses.allow(bias), addresses.bordered(dy))
    assert addresses.num_checked > 0
    assert launches.names == [f"{OPS[op]}_forward", f"{OPS[op]}_backward"]
    assert_equal(found, expected, rtol=1e-12, atol=1e-13)


@each_op
def test_columns_and_gradients_of_any_stride(op):
    """Transposed rows, a gradient that is expanded from one number, leading dims."""
    impl, reference = IMPLS[OPS[op]]
    x, bias, _ = inputs(op, 6, 5)
    x, dy = x.t().contiguous().t(), torch.full((), 0.5, dtype=torch.float64).expand(6, 5)
    expected = run(op, reference, x, bias, dy)
    assert_equal(run(op, impl, x, bias, dy), expected, rtol=1e-12, atol=1e-13)
    cube = run(op, impl, x.reshape(2, 3, -1), bias, dy.reshape(2, 3, -1))
    assert cube[0].shape == (2, 3, 5)
    assert_equal([t.reshape(e.shape) for t, e in zip(cube, expected, strict=True)], expected, rtol=1e-12, atol=1e-13)


@each_op
def test_no_rows(op):
    impl, reference = IMPLS[OPS[op]]
    x, bias, dy = inputs(op, 0, 6, torch.float32)
    assert_equal(run(op, impl, x, bias, dy), run(op, reference, x, bias, dy), rtol=0.0, atol=0.0)


@each_op
def test_rows_far_apart(op, monkeypatch):
    """Row 2 starts 2^31 elements after row 0: a 32-bit offset would wrap."""
    impl, reference = IMPLS[OPS[op]]
    x, bias, dy = inputs(op, 3, 8, torch.float16)
    far_x, far_dy = far_rows(x.shape[1]).copy_(x), far_rows(8).copy_(dy)
    addresses = Addresses(monkeypatch)
    found = run(op, impl, *(addresses.allow(t) for t in (far_x, bias, far_dy)))
    assert_equal(found, run(op, reference, x, bias, dy), rtol=2**-10, atol=2**-14)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_tails(sign):
    """Far from zero: nothing overflows into NaN, and the slope is 0 or 1."""
    far = sign * torch.tensor([[20.0, 88.0, 100.0, 1e4]])
    slope = torch.full((1, 4), 1.0 if sign > 0 else 0.0)
    ones = torch.ones_like(far)
    torch.testing.assert_close(gelu_triton.forward(far), far * slope, rtol=0.0, atol=0.0)
    torch.testing.assert_close(gelu_triton.backward(ones, far), slope, rtol=0.0, atol=0.0)
    both = torch.cat([far, ones], dim=1)
    torch.testing.assert_close(swiglu_triton.forward(both), far * slope, rtol=0.0, atol=1e-7)
    dgate, dup = swiglu_triton.backward(ones, both).chunk(2, dim=1)
    torch.testing.assert_close(dgate, slope, rtol=0.0, atol=1e-7)
    torch.testing.assert_close(dup, far * slope, rtol=0.0, atol=1e-7)


@pytest.mark.parametrize("impl", IMPLS["gelu"], ids=["triton", "reference"])
def test_bias_gelu_is_gelu_of_the_sum(impl):
    """With the sum in fp32, and the bias's gradient in its main gradient."""
    x, bias, dy = inputs("bias_gelu", 5, 7, torch.float16)
    bias = torch.nn.Parameter(bias)
    bias.main_grad = torch.ones(7)
    x.requires_grad_()
    y = bias_gelu(x, bias, impl=impl)
    y.backward(dy)
    wide, wide_bias = x.detach().double().requires_grad_(), bias.detach().double().requires_grad_()
    truth = gelu_cases.truth(wide, wide_bias)
    truth.backward(dy.double())
    noise = 8 * 2**-24  # of fp32 in 1 + tanh, times |x + bias| < 8
    torch.testing.assert_close(y.double(), truth, rtol=2**-11, atol=noise)
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=2**-11, atol=8 * noise)
    assert bias.grad is None
    torch.testing.assert_close(bias.main_grad.double(), 1.0 + wide_bias.grad, rtol=1e-6, atol=1e-5)


def test_gradcheck_of_the_bias_reference():
    x, bias = (t.requires_grad_() for t in randn((3, 4), (4,)))
    assert torch.autograd.gradcheck(bias_gelu, (x, bias))


def test_a_bias_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"bias of shape \(2,\) does not fit rows of 3"):
        bias_gelu(torch.ones(2, 3), torch.ones(2))
