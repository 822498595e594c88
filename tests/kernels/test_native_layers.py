"""RMSNorm, RoPE, SwiGLU and attention in C++: the error rule, the same bits on every vector level and thread count,
strides, masks, tails, and what is refused."""

import ctypes
import importlib
import math
import signal

import pytest
import torch

from megalite.kernels.attention import attention
from megalite.kernels.check import check_op
from megalite.kernels.rope.tables import frequencies, tables
from tests.kernels.native_tools import (
    CPU,
    DTYPES,
    GRAIN,
    Calls,
    Guards,
    at_page_end,
    between_nan,
    exit_status,
    randn,
)

pytestmark = pytest.mark.timeout(60)
FUNCTIONS = {
    "rmsnorm": {"rmsnorm", "rmsnorm_backward"},
    "rope": {"rope"},
    "swiglu": {"swiglu"},
    "attention": {"attention"},
}
HEADS = (4, 2, 2)
LONGEST = 300
"""Positions of attention where other ops have any number of rows: it takes the square of it."""
EPS = 1e-5
each_op = pytest.mark.parametrize("op", FUNCTIONS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])


def impl_of(op, name="native_impl"):
    return importlib.import_module(f"megalite.kernels.{op}.{name}")


def inputs(op, rows, width, dtype=torch.float32):
    """The tensors of all functions of an op; rope has `rows` positions, and 7 heads of 2 * width, 5 of them rotated."""
    if op == "attention":
        rows = min(rows, LONGEST)
        return [
            randn(2, rows, sum(HEADS), 2 * width, dtype=dtype),
            randn(2 * rows, HEADS[0] * 2 * width, dtype=dtype, seed=1),
        ]
    if op == "swiglu":
        return [3.0 * randn(rows, 2 * width, dtype=dtype), randn(rows, width, dtype=dtype, seed=1)]
    if op == "rmsnorm":
        x, residual, dy, dtotal = (randn(rows, width, dtype=dtype, seed=seed) for seed in range(4))
        return [x, residual, 1.0 + 0.1 * randn(width, dtype=dtype, seed=4), dy, dtotal]
    return [randn(2, rows, heads, 2 * width, dtype=dtype, seed=heads) for heads in (7, 3, 2, 2)]


def run(op, impl, tensors):
    """All results of all functions."""
    if op == "attention":
        return run_attention(impl, *tensors)
    if op == "swiglu":
        gate_up, dy = tensors
        return [impl.forward(gate_up), impl.backward(dy, gate_up)]
    if op == "rmsnorm":
        x, residual, weight, dy, dtotal = tensors
        y, rstd = impl.forward(x, weight, EPS)
        both = impl.forward_residual(x, residual, weight, EPS)
        grads = impl.backward(dy, x, weight, rstd)
        return [y, rstd, *both, *grads, *impl.backward_residual(dy, dtotal, both[1], weight, both[2])]
    qkv, *grads = tensors
    angles = tables(frequencies(qkv.shape[3], 100.0), qkv.shape[1], dtype=torch.float32, device=CPU)
    found = [impl.forward(qkv, *angles, 5), impl.backward(qkv, *angles, 5)]
    if hasattr(impl, "backward_heads"):
        return [*found, impl.backward_heads(grads, *angles)]
    return [*found, impl.backward(torch.cat(grads, dim=2), *angles, 5)]


def run_reference(op, tensors):
    """What `run` shall find. The reference of attention is torch's, which rounds more often than once in bf16."""
    if op != "attention":
        return run(op, impl_of(op, "reference"), tensors)
    return [x.to(tensors[0].dtype) for x in run(op, impl_of(op, "reference"), [x.float() for x in tensors])]


def run_attention(impl, qkv, dmixed):
    """Rows and gradients, as autograd gives them, rotated within documents and neither."""
    rope = tables(frequencies(qkv.shape[3], 100.0), qkv.shape[1], dtype=torch.float32, device=CPU)
    documents = (torch.arange(qkv.shape[1]) // 7).expand(qkv.shape[:2])
    found = []
    for angles, ids in ((rope, documents), (None, None)):
        leaf = qkv.detach().requires_grad_()
        mixed = attention(leaf, heads=HEADS, angles=angles, documents=ids, impl=impl)
        found += [mixed.detach(), *torch.autograd.grad(mixed, leaf, dmixed)]
    return found


def bits(results):
    return [x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32) for x in results]


def assert_near(found, expected, dtype, rows):
    """Within some roundings of fp32, relative to the largest value, and one of the result's dtype.

    rows: how many terms a sum over rows, such as dweight, has.
    """
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), i
        atol = (16 + rows) * torch.finfo(torch.float32).eps * max(1.0, float(other.abs().max()) if other.numel() else 0)
        rtol = 2 * torch.finfo(dtype).eps if dtype == torch.bfloat16 else 0.0
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol, msg=lambda m, i=i: f"result {i}: {m}")


@each_op
@each_dtype
def test_error_rule(op, dtype, monkeypatch):
    calls = Calls(monkeypatch)
    outcome = check_op(op, impl_of(op), device=CPU, dtype=dtype)
    assert outcome.failures == []
    assert outcome.num_cases >= 4
    assert set(calls.names) == FUNCTIONS[op], "another implementation ran"


@each_op
@each_dtype
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 16), (5, 37), (130, 48), (2 * GRAIN // 96 + 5, 48)])
def test_vector_levels_and_threads_give_the_same_bits(op, dtype, rows, width, monkeypatch):
    tensors = inputs(op, rows, width, dtype)
    scalar, best = None, Calls(monkeypatch).module.simd_level()
    monkeypatch.undo()
    for simd in range(best + 1):
        for threads in (1, 3):
            with monkeypatch.context() as patch:
                calls = Calls(patch, simd=simd, threads=threads)
                found = bits(run(op, impl_of(op), tensors))
            assert set(calls.names) == FUNCTIONS[op]
            scalar = scalar or found
            assert all(torch.equal(a, b) for a, b in zip(found, scalar, strict=True)), (simd, threads)


@each_op
@each_dtype
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (4, 16), (3, 21), (70, 32)])
@pytest.mark.parametrize("simd", [0, -1], ids=["scalar", "best"])
def test_touches_only_its_elements(op, dtype, rows, width, simd, monkeypatch):
    """Inputs between NaN, results poisoned inside and watched on both sides."""
    tensors = inputs(op, rows, width, dtype)
    expected = run_reference(op, tensors)
    strided = [between_nan(x) for x in tensors]
    before = [x.clone() for x in strided]
    Calls(monkeypatch, simd=simd)
    guards = Guards(monkeypatch)
    found = run(op, impl_of(op), strided)
    assert guards.check() >= 2
    assert_near(found, expected, dtype, rows)
    assert all(torch.equal(a, b) for a, b in zip(strided, before, strict=True)), "an input was changed"


@each_op
@each_dtype
@pytest.mark.parametrize("width", [1, 21])
def test_reads_nothing_behind_its_inputs(op, dtype, width, monkeypatch):
    """Inputs that end where memory ends: one element further is a segmentation fault."""
    Calls(monkeypatch)

    def work():
        kept = []
        run(op, impl_of(op), [at_page_end(x, kept) for x in inputs(op, 3, width, dtype)])

    assert exit_status(work) == 0


def test_the_end_of_memory_is_noticed():
    def work():
        kept = []
        ctypes.string_at(at_page_end(torch.ones(5), kept).data_ptr(), 21)

    assert exit_status(work) == -signal.SIGSEGV


@each_op
def test_any_strides(op, monkeypatch):
    """Columns that are not contiguous, and gradients expanded from one number."""
    tensors = inputs(op, 6, 10)
    expected = run(op, impl_of(op, "reference"), tensors)
    calls = Calls(monkeypatch)
    turned = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in tensors]
    assert not all(x.is_contiguous() for x in turned)
    assert_near(run(op, impl_of(op), turned), expected, torch.float32, 6)
    flat = [
        x if i in (0, 2) and op == "rmsnorm" else torch.full((), 0.5).expand(x.shape) for i, x in enumerate(tensors)
    ]
    assert_near(run(op, impl_of(op), flat), run(op, impl_of(op, "reference"), flat), torch.float32, 6)
    assert set(calls.names) == FUNCTIONS[op]


@each_op
@each_dtype
def test_no_rows(op, dtype, monkeypatch):
    Calls(monkeypatch)
    tensors = inputs(op, 0, 8, dtype)
    found, expected = (run(op, impl_of(op, name), tensors) for name in ("native_impl", "reference"))
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]
    assert not any(x.any() for x in found), "a gradient of no rows is zero"


@each_op
def test_what_they_do_not_take_is_refused(op, monkeypatch):
    calls = Calls(monkeypatch)
    for dtype in (torch.float64, torch.float16):
        with pytest.raises(ValueError, match="take fp32 or bf16 tensors of one dtype on the CPU, not torch.float"):
            run(op, impl_of(op), inputs(op, 2, 4, dtype))
    mixed = inputs(op, 2, 4)
    mixed[1] = mixed[1].bfloat16()
    call = {"attention": lambda: impl_of(op).backward(mixed[1], mixed[0], torch.zeros(2, 4, 2), HEADS, None, None)}
    with pytest.raises(ValueError, match="of one dtype"):  # autograd would convert attention's gradient
        call.get(op, lambda: run(op, impl_of(op), mixed))()
    bad_sizes = (1, 1, 3, 2, 8)
    run_bad = {
        "attention": lambda: calls.module.attention((0,) * 4, (0, 0), 0, (0, 0), (0, 0), bad_sizes, 1.0, False, 1),
        "rope": lambda: calls.module.rope([[0] * 6], 0, 0, 0, (-1, 1, 1), 1.0, False, 1),
        "swiglu": lambda: calls.module.swiglu(0, 0, 0, 0, 0, (1, -1), False, 1),
        "rmsnorm": lambda: calls.module.rmsnorm((0, 0), (1, 0), 0, (0, 0, 0), (0, 0), EPS, False, 1),
    }
    with pytest.raises(ValueError, match="out of range"):
        run_bad[op]()


def test_swiglu_s_own_exponential(monkeypatch):
    """silu over its whole range: a few units of the last place, as the exponential, a sum and a division give."""
    Calls(monkeypatch)
    gate = torch.cat(
        [torch.linspace(-87.0, 87.0, 400_001), torch.logspace(-30, 0, 1000), -torch.logspace(-30, 0, 1000)]
    )
    both = torch.stack([gate, torch.ones_like(gate)], dim=1)
    wide = gate.double()
    truth = wide / (1.0 + (-wide).exp())
    found = impl_of("swiglu").forward(both)[:, 0].double()
    assert ((found - truth).abs() / truth.abs().clamp(min=1e-300)).max() <= 4 * torch.finfo(torch.float32).eps
    slope = impl_of("swiglu").backward(torch.ones(len(gate), 1), both)[:, 0].double()
    sigmoid = 1.0 / (1.0 + (-wide).exp())
    exact = sigmoid * (1.0 + wide * (1.0 - sigmoid))
    assert (slope - exact).abs().max() <= 4 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("simd", [0, -1], ids=["scalar", "best"])
def test_swiglu_far_from_zero(simd, monkeypatch):
    """Nothing overflows into NaN, the slope is 0 or 1, and NaN and infinity go where the formula sends them."""
    Calls(monkeypatch, simd=simd)
    far = torch.tensor([[20.0, 88.0, 89.5, 104.0, 1e4, 3e38] * 4])
    impl = impl_of("swiglu")
    for gate, slope in ((far, 1.0), (-far, 0.0)):
        ones = torch.ones_like(gate)
        both = torch.cat([gate, ones], dim=1)
        torch.testing.assert_close(impl.forward(both), gate * slope, rtol=0.0, atol=1e-7)
        dgate, dup = impl.backward(ones, both).chunk(2, dim=1)
        torch.testing.assert_close(dgate, ones * slope, rtol=0.0, atol=1e-7)
        torch.testing.assert_close(dup, gate * slope, rtol=0.0, atol=1e-7)
    broken = torch.tensor([[math.nan, math.inf, 1.0, 1.0, 2.0, math.nan]])
    assert impl.forward(broken)[0, :2].isnan().tolist() == [True, False]
    assert impl.forward(broken)[0].tolist()[1:] == [math.inf, pytest.approx(math.nan, nan_ok=True)]
    assert impl.backward(torch.ones(1, 3), broken)[0].isnan()[[0, 3]].all()


@pytest.mark.parametrize("op", [op for op in FUNCTIONS if op != "attention"])
def test_nan_is_not_lost(op, monkeypatch):
    """A NaN in a row shows in the results of that row."""
    Calls(monkeypatch)
    tensors = inputs(op, 4, 20)
    tensors[0].view(-1)[3] = math.nan
    found, expected = (run(op, impl_of(op, name), tensors) for name in ("native_impl", "reference"))
    assert [x.isnan().sum() for x in found] == [x.isnan().sum() for x in expected]
    assert sum(int(x.isnan().sum()) for x in found) > 0


def test_rope_heads_that_pass_are_copied_bit_for_bit(monkeypatch):
    Calls(monkeypatch)
    qkv = inputs("rope", 4, 3)[0]
    qkv[:, 1, 5:] = torch.tensor(math.nan)
    angles = tables(frequencies(6, 100.0), 4, dtype=torch.float32, device=CPU)
    found = impl_of("rope").forward(qkv, *angles, 5)
    assert torch.equal(found[:, :, 5:].contiguous().view(torch.int32), qkv[:, :, 5:].contiguous().view(torch.int32))
    assert not torch.equal(found[:, 1:, :5], qkv[:, 1:, :5])
    whole = impl_of("rope").forward(qkv, *angles, 0)
    assert torch.equal(whole.view(torch.int32), qkv.view(torch.int32))


def test_rmsnorm_result_of_a_row_does_not_depend_on_its_neighbours(monkeypatch):
    """A shard of rows gives the bits that all rows would; dweight is summed over blocks of 64 rows in order."""
    Calls(monkeypatch)
    x, _, weight, dy, _ = inputs("rmsnorm", 200, 48)
    y, rstd = impl_of("rmsnorm").forward(x, weight, EPS)
    dx, dweight = impl_of("rmsnorm").backward(dy, x, weight, rstd)
    part, part_rstd = impl_of("rmsnorm").forward(x[17:90], weight, EPS)
    assert torch.equal(part, y[17:90])
    assert torch.equal(part_rstd, rstd[17:90])
    assert torch.equal(impl_of("rmsnorm").backward(dy[17:90], x[17:90], weight, rstd[17:90])[0], dx[17:90])
    blocks = [
        impl_of("rmsnorm").backward(*(t[low : low + 64] for t in (dy, x)), weight, rstd[low : low + 64])[1]
        for low in range(0, 200, 64)
    ]
    total = torch.zeros(48)
    for block in blocks:
        total += block
    assert torch.equal(dweight, total)
