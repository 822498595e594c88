"""AdamW kernels against the formula in float64 and torch: error, bits across vector levels and threads, bf16."""

import numpy as np
import pytest
import torch

from megalite import native
from megalite.kernels.adamw import Hyper, Tensors, adamw_step, cases, native_impl, reference
from megalite.kernels.adamw.select import choose
from megalite.kernels.adamw.table import address_table

FP32 = [case for case in cases.CASES if case.dtype == torch.float32]
NAMES = ("main", "exp_avg", "exp_avg_sq")
CPU = torch.device("cpu")
LARGE = 3 * (1 << 17) + 21
"""Elements that three threads share, with a tail."""


@pytest.fixture
def ext():
    if native.load() is None:
        pytest.skip(f"not built: {native.why_missing()}")
    return native.load()


def errors(made: Tensors, case, tensors) -> list[float]:
    """Largest errors of main, exp_avg and exp_avg_sq, in units of the last place of the old or new value."""
    olds = [tensor.detach().double() for tensor in tensors]
    truths = cases.truth(*olds)
    info, found = torch.finfo(case.dtype), []
    for name, old, truth in zip(NAMES, (olds[0], olds[2], olds[3]), truths, strict=True):
        value = getattr(made, name).double()
        unit = info.eps * old.abs().maximum(truth.abs()).clamp(min=info.tiny)
        found.append(((value - truth).abs() / unit).max().item() if value.numel() else 0.0)
    return found


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: f"{case.name}-{case.dtype}")
def test_reference_is_the_formula(case):
    tensors, _ = case.inputs()
    made = cases.call(*tensors)
    assert max(errors(made, case, tensors)) <= 8
    assert torch.equal(made.out_copy, made.main.bfloat16())


@pytest.mark.parametrize("case", FP32, ids=lambda case: case.name)
def test_native_error_is_at_most_twice_the_reference_s(ext, case):
    tensors, _ = case.inputs()
    made = cases.call(*tensors, impl=native_impl)
    allowed = [max(2 * error, 2.0) for error in errors(cases.call(*tensors), case, tensors)]
    for name, error, limit in zip(NAMES, errors(made, case, tensors), allowed, strict=True):
        assert error <= limit, name
    assert torch.equal(made.out_copy.view(torch.int16), made.main.bfloat16().view(torch.int16))


def test_native_steps_equal_torch_fused_to_ulps(ext):
    """100 steps: each moment and parameter within a few units of the last place of torch's, relative to the updates."""
    tensors = [tensor.detach() for tensor in cases.make_case(5000, dtype=torch.float32).inputs()[0]]
    ours, theirs = ([tensor.clone() for tensor in tensors] for _ in range(2))
    generator = torch.Generator().manual_seed(3)
    for number in range(1, 101):
        grad = torch.randn(5000, generator=generator)
        hyper = Hyper(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=number)
        for set_of, impl in ((ours, native_impl), (theirs, reference)):
            before = set_of[0].clone()
            adamw_step([Tensors(set_of[0], grad, set_of[2], set_of[3])], hyper, impl=impl)
            set_of.append(set_of[0] - before)
    for i in (0, 2, 3):
        scale = theirs[i].abs().clamp(min=theirs[i].abs().mean())
        assert ((ours[i] - theirs[i]).abs() / scale).max() <= 16 * torch.finfo(torch.float32).eps, i
    one_ulp = torch.finfo(torch.float32).eps * theirs[0].abs()
    assert ((ours[-1] - theirs[-1]).abs() <= 1e-5 * theirs[-1].abs() + 2 * one_ulp).all()


def run_native(ext, case, *, threads: int = 1, simd: int = -1, copy_offset: int = 0) -> list[torch.Tensor]:
    main, grad, exp_avg, exp_avg_sq = (tensor.detach().clone() for tensor in case.inputs()[0])
    copy = torch.full((main.numel() + copy_offset,), torch.nan, dtype=torch.bfloat16)[copy_offset:]
    table = address_table([Tensors(main, grad, exp_avg, exp_avg_sq, copy)])
    ext.adamw(table, np.array([0.1]), (1e-2, 0.9, 0.95, 1e-8), 4, 0.3, threads, simd)
    return [main, exp_avg, exp_avg_sq, copy.view(torch.int16)]


@pytest.mark.parametrize("num", [1, 7, 16, 100, 4099, LARGE])
def test_vector_levels_and_threads_give_the_same_bits(ext, num):
    case = cases.make_case(num, dtype=torch.float32)
    scalar = run_native(ext, case, simd=0)
    for simd in range(1, ext.simd_level() + 1):
        for threads in (1, 3):
            for copy_offset in (0, 1):  # streaming stores and plain ones
                found = run_native(ext, case, simd=simd, threads=threads, copy_offset=copy_offset)
                assert all(torch.equal(a, b) for a, b in zip(found, scalar, strict=True)), (simd, threads)


def test_an_element_s_result_does_not_depend_on_its_place(ext):
    """A shard of another layout begins elsewhere and has another tail."""
    tensors = [tensor.detach() for tensor in cases.make_case(200, dtype=torch.float32).inputs()[0]]
    whole = cases.call(*tensors, impl=native_impl)
    part = cases.call(*(tensor[3:190] for tensor in tensors), impl=native_impl)
    for name in NAMES:
        assert torch.equal(getattr(part, name), getattr(whole, name)[3:190])


def test_bf16_copy_rounds_to_nearest_even_and_keeps_nan_and_infinity(ext):
    """With lr 0 and no decay main stays, so the copy is the rounding of chosen numbers."""
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x00000001, 0x80008000 - 2**32])
    main = torch.cat([bits.int().view(torch.float32), torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0])])
    main = torch.cat([main] * 4)  # vectors and a tail
    zeros = torch.zeros_like(main)
    copy = torch.ones_like(main, dtype=torch.bfloat16)
    before = main.clone()
    hyper = Hyper(lr=0.0, beta1=0.9, beta2=0.9, eps=1e-8, weight_decay=0.0, step=1)
    adamw_step([Tensors(main, zeros, zeros.clone(), zeros.clone(), copy)], hyper, impl=native_impl)
    nan = before.isnan()  # torch itself writes several NaNs
    assert torch.equal(copy[~nan].view(torch.int16), before[~nan].bfloat16().view(torch.int16))
    assert (copy[nan].view(torch.int16) == 0x7FC0).all()
    assert torch.equal(torch.nan_to_num(main, nan=7.0), torch.nan_to_num(before, nan=7.0))


@pytest.mark.parametrize("impl", [reference, native_impl])
def test_gradients_stay_and_any_scale_and_copy_work(ext, impl):
    tensors, _ = cases.make_case(40, dtype=torch.float32).inputs()
    main, grad, exp_avg, exp_avg_sq = (tensor.detach().clone() for tensor in tensors)
    before, copy = grad.clone(), torch.zeros(40, dtype=torch.float16)
    adamw_step(
        [Tensors(main, grad, exp_avg, exp_avg_sq, copy)], cases.HYPER, scale=torch.tensor(cases.SCALE), impl=impl
    )
    assert torch.equal(grad, before)
    assert torch.equal(copy, main.half())
    assert torch.equal(main, cases.call(*tensors, impl=impl).main)
    unscaled = cases.call(*tensors, impl=impl, scale=1.0)
    assert not torch.equal(unscaled.exp_avg, exp_avg)


def test_native_tells_autograd_that_it_wrote(ext):
    tensors = [tensor.detach().clone() for tensor in cases.make_case(9, dtype=torch.float32).inputs()[0]]
    weight = tensors[0].requires_grad_()
    y = (weight * weight).sum()
    adamw_step([Tensors(weight.detach(), *tensors[1:])], cases.HYPER, impl=native_impl)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_tensors_that_kernels_can_t_take_are_refused():
    main, grad, exp_avg, exp_avg_sq = torch.zeros(4, 8).unbind()
    good = {"main": main, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    for name, bad, match in [
        ("grad", torch.zeros(7), "as long as main"),
        ("grad", torch.zeros(16)[::2], "contiguous"),
        ("exp_avg", torch.zeros(8, dtype=torch.float64), r"exp_avg is torch.float64"),
        ("out_copy", torch.zeros(4, 2), "flat"),
    ]:
        with pytest.raises(ValueError, match=match):
            adamw_step([Tensors(**good | {name: bad})], cases.HYPER)
    with pytest.raises(ValueError, match="step=0 must be at least 1"):
        adamw_step([], Hyper(1e-3, 0.9, 0.95, 1e-8, 0.0, step=0))


def test_the_extension_refuses_bad_calls(ext):
    numbers = (1e-3, 0.9, 0.95, 1e-8)
    table = np.zeros((1, 6), np.int64)
    for arguments, match in [
        ((table[:, :5], np.zeros(1), numbers, 1, 1.0, 1), "slices"),
        ((table, np.zeros(2), numbers, 1, 1.0, 1), "decays"),
        ((table, np.zeros(1), numbers[:3], 1, 1.0, 1), "hyper"),
        ((table, np.zeros(1), numbers, 0, 1.0, 1), "out of range"),
        ((table, np.zeros(1), numbers, 1, 1.0, 0), "out of range"),
        ((table, np.zeros(1), numbers, 1, 1.0, 1, 9), "out of range"),
        ((table - 1, np.zeros(1), numbers, 1, 1.0, 1), "negative"),
    ]:
        with pytest.raises(ValueError, match=match):
            ext.adamw(*arguments)


def test_which_implementation_runs(ext, monkeypatch):
    assert choose("adamw", "auto", device=CPU, dtype=torch.float32).name == "native"
    assert choose("adamw", "auto", device=CPU, dtype=torch.float64).name == "reference"
    assert choose("adamw", "reference", device=CPU, dtype=torch.float32).module is reference
    with pytest.raises(
        ValueError, match=r"implementation=cuda can't be met for adamw: it needs a CUDA device.* auto or"
    ):
        choose("adamw", "cuda", device=CPU, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"native can't be met.*fp32.*float64.*use auto or reference"):
        choose("adamw", "native", device=CPU, dtype=torch.float64)
    monkeypatch.setattr(native, "load", lambda: None)
    monkeypatch.setattr(native, "why_missing", lambda: "no compiler")
    assert choose("adamw", "auto", device=CPU, dtype=torch.float32).name == "reference"
    with pytest.raises(ValueError, match="the extension is missing: no compiler"):
        choose("adamw", "native", device=CPU, dtype=torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("num", [0, 1, 100, 4099, LARGE])
def test_cuda_gives_the_bits_of_the_cpu_kernel(num):
    device = torch.device("cuda")
    module = choose("adamw", "cuda", device=device, dtype=torch.float32).module
    tensors, _ = cases.make_case(num, dtype=torch.float32).inputs()
    made = cases.call(*(tensor.detach().to(device) for tensor in tensors), impl=module)
    expected = cases.call(*tensors, impl=native_impl)
    for name in (*NAMES, "out_copy"):
        assert torch.equal(getattr(made, name).cpu(), getattr(expected, name)), name
