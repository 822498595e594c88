"""Every op against its formula: gradcheck in float64, bounded error against float64 from the same rounded inputs."""

import pytest
import torch

from megalite.batch import IGNORE
from megalite.kernels.attention import cases as attention
from megalite.kernels.cross_entropy import cases as cross_entropy
from megalite.kernels.cross_entropy import cross_entropy as cross_entropy_op
from megalite.kernels.gelu import cases as gelu
from megalite.kernels.layernorm import cases as layernorm
from megalite.kernels.layernorm import layernorm_beside
from megalite.kernels.rmsnorm import cases as rmsnorm
from megalite.kernels.rmsnorm import rmsnorm_beside
from megalite.kernels.rope import cases as rope
from megalite.kernels.swiglu import cases as swiglu
from megalite.kernels.wgrad import cases as wgrad

OPS = {
    "rmsnorm": rmsnorm,
    "layernorm": layernorm,
    "attention": attention,
    "rope": rope,
    "swiglu": swiglu,
    "gelu": gelu,
    "cross_entropy": cross_entropy,
}


def every_case(ops):
    return [
        pytest.param(module, case, id=f"{name}-{case.name}-{str(case.dtype).removeprefix('torch.')}")
        for name, module in ops.items()
        for case in module.CASES
    ]


def check_error(found, truth, case, what, dy=None):
    """At most one rounding to the result's dtype and some in the compute dtype, relative to the largest value.

    A gradient is a sum of terms of the size of dy, which may cancel.
    """
    assert found.shape == truth.shape
    assert torch.isfinite(found).all(), f"{what} is not finite"
    scale = max((x.abs().max().item() for x in (truth, dy) if x is not None and x.numel()), default=0.0)
    atol = case.roundings * torch.finfo(case.compute).eps * scale
    torch.testing.assert_close(
        found.double(), truth, rtol=torch.finfo(found.dtype).eps, atol=atol, msg=lambda m: f"{what}: {m}"
    )


@pytest.mark.parametrize(("module", "case"), every_case(OPS))
def test_error_against_float64(module, case):
    tensors, rest = case.inputs()
    y = module.call(*tensors, *rest)
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = module.truth(*wide, *rest)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y.dtype)
    check_error(y.detach(), expected.detach(), case, "forward")
    y.backward(dy)
    expected.backward(dy.double())
    for i, (tensor, truth) in enumerate(zip(tensors, wide, strict=True)):
        check_error(tensor.grad, truth.grad, case, f"gradient {i}", dy)


@pytest.mark.parametrize(("module", "case"), every_case({"wgrad": wgrad}))
def test_weight_gradient_is_added_in_the_main_dtype(module, case):
    tensors, _ = case.inputs()
    truth = module.truth(*[tensor.detach().double() for tensor in tensors])
    found = module.call(*tensors)
    assert found.dtype == case.compute
    check_error(found, truth, case, "main gradient")


@pytest.mark.parametrize("name", [name for name in OPS if name != "cross_entropy"])
def test_gradcheck(name):
    case = next(case for case in OPS[name].CASES if case.dtype == torch.float64 and case.name[0] in "23")
    tensors, rest = case.inputs()
    assert torch.autograd.gradcheck(lambda *xs: OPS[name].call(*xs, *rest), tensors)


@pytest.mark.parametrize("name", ["rmsnorm", "layernorm", "swiglu", "gelu"])
def test_strided_inputs_and_gradients(name):
    """Columns of a wider tensor, and a gradient that is expanded from one number."""
    case = next(case for case in OPS[name].CASES if case.dtype == torch.float32 and case.name == "16x64")
    (x, *params), _ = case.inputs()
    wide = torch.full((x.shape[0], x.shape[1] + 3), torch.nan)
    wide[:, 1:-2] = x.detach()
    strided = wide[:, 1:-2].requires_grad_()
    OPS[name].call(x, *params).sum().backward()
    grads = [param.grad.clone() for param in params]
    for param in params:
        param.grad = None
    OPS[name].call(strided, *params).sum().backward()
    assert torch.equal(strided.grad, x.grad)
    assert all(torch.equal(param.grad, grad) for param, grad in zip(params, grads, strict=True))


@pytest.mark.parametrize("name", ["rmsnorm", "layernorm"])
def test_norm_folds_leading_dims(name):
    tensors, _ = next(case for case in OPS[name].CASES if case.dtype == torch.float64 and case.name == "16x64").inputs()
    x, *params = tensors
    flat = OPS[name].call(x, *params)
    cube = OPS[name].call(x.view(2, 2, 4, 64), *params)
    assert torch.equal(cube.view(16, 64), flat)
    flat_grad, cube_grad = (torch.autograd.grad(y.square().sum(), tensors) for y in (flat, cube))
    assert all(torch.equal(a, b) for a, b in zip(flat_grad, cube_grad, strict=True))


@pytest.mark.parametrize("beside", [rmsnorm_beside, layernorm_beside])
def test_a_norm_beside_its_input_adds_both_gradients(beside):
    """One pass of the kernel, no addition of autograd's: what the norm and a plain use of x give together."""
    module = rmsnorm if beside is rmsnorm_beside else layernorm
    tensors, _ = next(case for case in module.CASES if case.dtype == torch.float64 and case.name == "16x64").inputs()
    x, *params = tensors
    y, skipped = beside(x.view(2, 8, 64), *params, eps=1e-5)
    assert skipped.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert torch.equal(y.view(16, 64), module.call(x, *params))
    dy, dx = (torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(i), dtype=x.dtype) for i in range(2))
    found = torch.autograd.grad((y, skipped), tensors, (dy, dx))
    expected = torch.autograd.grad(module.call(x, *params), tensors, dy.view(16, 64))
    torch.testing.assert_close(found[0], expected[0] + dx.view(16, 64), rtol=1e-14, atol=1e-14)
    assert all(torch.equal(a, b) for a, b in zip(found[1:], expected[1:], strict=True))


def test_norm_params_gradients_leave_in_fp32_for_bf16():
    x = torch.randn(512, 8).bfloat16()
    weight = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    weight.main_grad = torch.zeros(8)
    rmsnorm.call(x, weight).backward(x)
    truth = (x.double().square() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()).sum(0)
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad.double(), truth, rtol=1e-5, atol=0.0)  # bf16 would be off by 4e-3


def test_cross_entropy_with_upstream_per_token():
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    targets, upstream = torch.tensor([IGNORE, 1, 2, 4]), torch.arange(4.0, dtype=torch.float64)
    loss = cross_entropy_op(logits * 1.0, targets)
    loss.backward(upstream)
    plain = logits.detach().clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(plain, targets, reduction="none")
    expected.backward(upstream)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(logits.grad, plain.grad)


def test_cross_entropy_writes_the_gradient_into_the_logits():
    leaf = torch.randn(4, 5, requires_grad=True)
    logits = leaf * 1.0
    before = logits.detach().clone()
    loss = cross_entropy_op(logits, torch.tensor([0, 1, 2, 3]))
    assert torch.equal(logits, before), "forward must leave the logits alone"
    loss.sum().backward()
    assert torch.equal(logits, leaf.grad)


def test_cross_entropy_without_gradient_and_with_all_ignored():
    logits, targets = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    with torch.no_grad():
        found = cross_entropy_op(logits, targets)
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
    leaf = torch.full((4, 3), 1e4, requires_grad=True)
    loss = cross_entropy_op(leaf * 1.0, torch.full((4,), IGNORE))
    loss.sum().backward()
    assert not loss.any()
    assert not leaf.grad.any()


def test_cross_entropy_in_pieces(monkeypatch):
    """Rows that do not fit one temporary: the same numbers."""
    tensors, rest = next(
        c for c in cross_entropy.CASES if c.name == "65x129v129" and c.dtype == torch.bfloat16
    ).inputs()
    whole = cross_entropy.call(*tensors, *rest)
    grad = torch.autograd.grad(whole.sum(), tensors)[0]
    monkeypatch.setattr("megalite.kernels.cross_entropy.reference.PIECE", 1000)
    pieces = cross_entropy.call(*tensors, *rest)
    assert torch.equal(pieces, whole)
    assert torch.equal(torch.autograd.grad(pieces.sum(), tensors)[0], grad)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rmsnorm.call(torch.ones(2, 3), torch.ones(4)), "does not fit rows of 3"),
        (lambda: layernorm.call(torch.ones(2, 3), torch.ones(3), torch.ones(4)), "do not fit rows of 3"),
        (lambda: swiglu.call(torch.ones(2, 3)), "even number of columns"),
        (lambda: rope.call(torch.ones(1, 2, 3, 4), torch.ones(3, 2), torch.ones(3, 2), 2), "do not fit qkv"),
        (lambda: cross_entropy_op(torch.ones(2, 3), torch.ones(3, dtype=torch.int64)), r"must be \(2,\) int64"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
