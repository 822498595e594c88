"""The sum of squares against exact arithmetic, and its bits across vector levels and threads."""

import math

import pytest
import torch

from megalite import native
from megalite.kernels.adamw.select import choose
from megalite.kernels.grad_norm import cases, native_impl, reference, square_sum

CPU = torch.device("cpu")


@pytest.fixture
def ext():
    if native.load() is None:
        pytest.skip(f"not built: {native.why_missing()}")
    return native.load()


def exact(grad: torch.Tensor) -> float:
    """Squares of fp32 numbers are exact in fp64; fsum rounds their sum once."""
    return math.fsum(x * x for x in grad.tolist())


@pytest.mark.parametrize("impl", [reference, native_impl])
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_sum_is_exact_to_fp64(ext, case, impl):
    (grad,), _ = case.inputs()
    found = cases.call(grad, impl=impl)
    assert (found.dtype, found.shape) == (torch.float64, ())
    assert found.item() == pytest.approx(exact(grad), rel=1e-14, abs=0.0)  # fp32 sums would be off by 1e-7


@pytest.mark.parametrize("num", [0, 5, 33, 16384, 16385, 3 * (1 << 17) + 21])
def test_vector_levels_and_threads_give_the_same_bits(ext, num):
    (grad,), _ = cases.make_case(num, dtype=torch.float32).inputs()
    sums = {
        ext.square_sum(grad.data_ptr(), num, threads, simd)
        for simd in range(ext.simd_level() + 1)
        for threads in (1, 3)
    }
    assert len(sums) == 1


@pytest.mark.parametrize("impl", [reference, native_impl])
def test_large_small_and_broken_numbers(ext, impl):
    assert square_sum(torch.full((10,), 3e38), impl=impl).item() == pytest.approx(10 * 9e76, rel=1e-6)
    assert square_sum(torch.full((10,), 1e-38), impl=impl).item() == pytest.approx(10 * 1e-76, rel=1e-6)
    for broken in (torch.inf, torch.nan):
        grad = torch.ones(100)
        grad[77] = broken
        assert not math.isfinite(square_sum(grad, impl=impl).item())


def test_bad_calls_are_refused(ext):
    for grad in (torch.zeros(2, 2), torch.zeros(8)[::2]):
        with pytest.raises(ValueError, match="flat and contiguous"):
            square_sum(grad)
    with pytest.raises(ValueError, match="out of range"):
        ext.square_sum(0, -1, 1)


def test_which_implementation_runs(ext):
    assert choose("grad_norm", "auto", device=CPU, dtype=torch.float32).module is native_impl
    assert choose("grad_norm", "auto", device=CPU, dtype=torch.float64).module is reference


@pytest.mark.gpu
def test_cuda_equals_the_cpu(ext):
    device = torch.device("cuda")
    module = choose("grad_norm", "cuda", device=device, dtype=torch.float32).module
    for case in cases.CASES:
        (grad,), _ = case.inputs()
        found = [square_sum(grad.detach().to(device), impl=module).item() for _ in range(2)]
        assert found[0] == found[1] == pytest.approx(exact(grad), rel=1e-14, abs=0.0)
