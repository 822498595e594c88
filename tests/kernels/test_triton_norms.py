"""RMSNorm and LayerNorm in Triton, in the interpreter: the error rule, masks, strides, wide rows, the residual add."""

import pytest
import torch

from megalite.kernels import norm_kernels
from megalite.kernels.check import check_op
from megalite.kernels.layernorm import layernorm, layernorm_residual
from megalite.kernels.layernorm import reference as layernorm_reference
from megalite.kernels.layernorm import triton_impl as layernorm_triton
from megalite.kernels.rmsnorm import reference as rmsnorm_reference
from megalite.kernels.rmsnorm import rmsnorm, rmsnorm_residual
from megalite.kernels.rmsnorm import triton_impl as rmsnorm_triton
from tests.kernels.addresses import Addresses
from tests.kernels.triton_tools import CPU, INTERPRETED, Launches, far_rows

EPS = 1e-5
OPS = {"rmsnorm": (rmsnorm_triton, rmsnorm_reference, 1), "layernorm": (layernorm_triton, layernorm_reference, 2)}
"""Implementations, and the number of parameters."""
NAMES = ("norm_forward", "norm_backward", "norm_backward_rows", "norm_backward_params")
PERSISTENT = {"norm_forward", "norm_backward"}
WIDE = {"norm_forward", "norm_backward_rows", "norm_backward_params"}
each_op = pytest.mark.parametrize("op", OPS)
each_residual = pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])


def randn(*shapes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def run(impl, residual, rows, params):
    """All results of forward and backward; rows = x, residual, dy, dtotal."""
    x, other, dy, dtotal = rows
    if not residual:
        y, *numbers = impl.forward(x, *params, EPS)
        return [y, *numbers, *impl.backward(dy, x, params[0], *numbers)]
    y, total, *numbers = impl.forward_residual(x, other, *params, EPS)
    return [y, total, *numbers, *impl.backward_residual(dy, dtotal, total, params[0], *numbers)]


def assert_equal(found, expected, **tolerance):
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(one, other, **tolerance, msg=lambda m, i=i: f"result {i}: {m}")


@each_op
@pytest.mark.parametrize("dtype", [torch.float64, *INTERPRETED])
def test_error_rule(op, dtype, monkeypatch):
    launches = Launches(monkeypatch, norm_kernels, *NAMES)
    outcome = check_op(op, OPS[op][0], device=CPU, dtype=dtype)
    assert outcome.failures == []
    assert outcome.num_cases > 5
    assert set(launches.names) == PERSISTENT


@each_op
@each_residual
@pytest.mark.parametrize("shape", [(1, 2), (9, 37), (4, 16)])
@pytest.mark.parametrize("path", ["persistent", "reload", "wide"])
def test_touches_only_its_rows(op, residual, shape, path, monkeypatch):
    """Every mask: rows with gaps of NaN between them, blocks that end beyond the row, poisoned results."""
    if path == "reload":
        monkeypatch.setattr(norm_kernels, "MAX_LOADED_ONCE", 0)
    if path == "wide":
        monkeypatch.setattr(norm_kernels, "MAX_PERSISTENT", {False: 0, True: 0})
        monkeypatch.setattr(norm_kernels, "WIDE_CONFIG", {"BLOCK": 16, "num_warps": 1})
        monkeypatch.setattr(norm_kernels, "WIDE_BLOCK", 16)
    impl, reference, num_params = OPS[op]
    rows, params = randn(*[shape] * 4), randn(*[shape[1:]] * num_params)
    expected = run(reference, residual, rows, params)
    launches = Launches(monkeypatch, norm_kernels, *NAMES)
    addresses = Addresses(monkeypatch)
    found = run(impl, residual, map(addresses.bordered, rows), list(map(addresses.allow, params)))
    assert addresses.num_checked > 0
    assert set(launches.names) == (WIDE if path == "wide" else PERSISTENT)
    assert_equal(found, expected, rtol=1e-12, atol=1e-13)


@each_op
@each_residual
def test_columns_and_gradients_of_any_stride(op, residual):
    """Transposed rows, a gradient that is expanded from one number."""
    impl, reference, num_params = OPS[op]
    x, other, dtotal = (x.t() for x in randn(*[(7, 5)] * 3))
    rows, params = (x, other, torch.ones(()).double().expand(5, 7), dtotal), randn(*[(7,)] * num_params)
    assert_equal(run(impl, residual, rows, params), run(reference, residual, rows, params), rtol=1e-12, atol=1e-13)


@each_op
@each_residual
def test_no_rows(op, residual):
    impl, reference, num_params = OPS[op]
    rows, params = [torch.empty(0, 6)] * 4, [torch.ones(6)] * num_params
    found, expected = (run(which, residual, rows, params) for which in (impl, reference))
    assert_equal(found, expected, rtol=0.0, atol=0.0)
    assert not found[-1].any()


@each_op
@each_residual
@pytest.mark.parametrize("path", ["persistent", "wide"])
def test_rows_far_apart(op, residual, path, monkeypatch):
    """Row 2 starts 2^31 elements after row 0: a 32-bit offset would wrap."""
    if path == "wide":
        monkeypatch.setattr(norm_kernels, "MAX_PERSISTENT", {False: 0, True: 0})
    impl, reference, num_params = OPS[op]
    near, params = randn(*[(3, 8)] * 4, dtype=torch.float16), randn(*[(8,)] * num_params, dtype=torch.float16)
    x, other, dy, dtotal = (far_rows(8).copy_(x) for x in near)
    addresses = Addresses(monkeypatch)
    for tensor in (x, other, dy, dtotal, *params):
        addresses.allow(tensor)
    found = run(impl, residual, (x, other, dy, dtotal), params)
    if residual:  # a sum that was kept elsewhere
        numbers = found[2 : 2 + num_params]
        found[2 + num_params :] = impl.backward_residual(dy, dtotal, other.copy_(found[1]), params[0], *numbers)
    assert_equal(found, run(reference, residual, near, params), rtol=2**-10, atol=2**-11)


@each_op
def test_the_rounded_sum_is_normalised(op):
    """What backward reads is what forward normalised: 2048 + 1.25 is 2048 + 2 in fp16, and rows differ by that."""
    impl, _, num_params = OPS[op]
    params = [torch.ones(4, dtype=torch.float16)] * num_params
    x = torch.tensor([[2048.0, 2050.0, 2052.0, 2054.0]], dtype=torch.float16)
    other = torch.full((1, 4), 1.25, dtype=torch.float16)
    y, total, *numbers = impl.forward_residual(x, other, *params, EPS)
    assert torch.equal(total, x + other)
    assert total[0, 0] == 2050.0
    assert_equal([y, *numbers], impl.forward(total, *params, EPS), rtol=0.0, atol=0.0)


@each_op
def test_too_wide_rows_are_refused(op):
    impl, _, num_params = OPS[op]
    width = norm_kernels.MAX_WIDTH + 1
    with pytest.raises(ValueError, match=r"at most 32768; use kernels\.rmsnorm=reference"):
        impl.forward(torch.ones(1, width), *[torch.ones(width)] * num_params, EPS)


@each_op
@pytest.mark.parametrize("which", ["triton", "reference"])
def test_residual_op_equals_two_ops(op, which):
    """Value and gradients of the fused op, with main gradients, against add and norm one after the other."""
    impl = OPS[op][which == "reference"]
    x, other, dy, dtotal = randn(*[(6, 10)] * 4)
    found, expected = [], []
    for fused, out in ((True, found), (False, expected)):
        leaves = [x.clone().requires_grad_(), other.clone().requires_grad_()]
        params = [torch.nn.Parameter(p) for p in randn(*[(10,)] * OPS[op][2])]
        for param in params:
            param.main_grad = torch.ones(10, dtype=torch.float64)
        if fused:
            names = dict(zip(("weight", "bias"), params, strict=False))
            y, total = {"rmsnorm": rmsnorm_residual, "layernorm": layernorm_residual}[op](
                *leaves, **names, eps=EPS, impl=impl
            )
        else:
            total = leaves[0] + leaves[1]
            y = {"rmsnorm": rmsnorm, "layernorm": layernorm}[op](total, *params, eps=EPS, impl=impl)
        torch.autograd.backward((y, total * 2.0), (dy, dtotal))
        assert all(param.grad is None for param in params)
        out += [y, total, *(leaf.grad for leaf in leaves), *(param.main_grad for param in params)]
    assert_equal(found, expected, rtol=1e-13, atol=1e-14)
    assert found[2].data_ptr() != found[3].data_ptr()


@each_op
@pytest.mark.parametrize("used", [0, 1], ids=["only the norm", "only the sum"])
def test_one_result_of_the_residual_op_is_used(op, used):
    impl, _, num_params = OPS[op]
    x, other, dy = randn(*[(3, 4)] * 3)
    params = dict(zip(("weight", "bias"), randn(*[(4,)] * num_params), strict=False))
    function = {"rmsnorm": rmsnorm_residual, "layernorm": layernorm_residual}[op]
    grads = []
    for which in (impl, OPS[op][1]):
        leaves = [x.clone().requires_grad_(), other.clone().requires_grad_()]
        function(*leaves, **params, eps=EPS, impl=which)[used].backward(dy)
        grads.append([leaf.grad for leaf in leaves])
    assert_equal(*grads, rtol=1e-13, atol=1e-14)


def test_residual_of_another_shape_is_refused():
    x, weight = torch.ones(2, 3), torch.ones(3)
    with pytest.raises(ValueError, match=r"residual of shape \(3,\) does not fit x"):
        rmsnorm_residual(x, weight, weight=weight, eps=EPS)
    with pytest.raises(ValueError, match=r"residual of shape \(3,\) does not fit x"):
        layernorm_residual(x, weight, weight=weight, bias=weight, eps=EPS)


@each_op
def test_gradcheck_of_the_residual_reference(op):
    x, other, *params = (t.requires_grad_() for t in randn((2, 3), (2, 3), *[(3,)] * OPS[op][2]))
    function = {"rmsnorm": rmsnorm_residual, "layernorm": layernorm_residual}[op]

    def call(x, other, *params):
        return function(x, other, **dict(zip(("weight", "bias"), params, strict=False)), eps=EPS)

    assert torch.autograd.gradcheck(call, (x, other, *params))
