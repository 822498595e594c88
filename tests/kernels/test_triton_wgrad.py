"""The weight gradient in Triton, in the interpreter, and which GEMM the reference takes."""

import pytest
import torch

from megalite.kernels.check import check_op
from megalite.kernels.wgrad import accumulate_wgrad, reference, triton_impl
from tests.kernels.addresses import Addresses
from tests.kernels.triton_tools import CPU, INTERPRETED, Launches, far_rows


@pytest.mark.parametrize("dtype", INTERPRETED)
def test_error_rule(dtype, monkeypatch):
    launches = Launches(monkeypatch, triton_impl, "_accumulate")
    assert check_op("wgrad", triton_impl, device=CPU, dtype=dtype).failures == []
    assert launches.names


@pytest.mark.parametrize("sizes", [(70, 130, 67), (33, 300, 65), (200, 1, 129)])
def test_tiles_with_tails(sizes):
    """More tiles than one group, and rows, outputs and inputs that do not fill the last one."""
    rows, out, width = sizes
    generator = torch.Generator().manual_seed(0)
    dy, x = (torch.randn(rows, n, generator=generator) for n in (out, width))
    main = torch.randn(out, width, generator=generator)
    expected = main.double() + dy.double().t() @ x.double()
    triton_impl.accumulate(main, dy, x)
    error = (main - expected).norm() / expected.norm()
    assert error <= 5e-6


def test_grouped_order_covers_every_tile(monkeypatch):
    """11 x 3 tiles in groups of 4: each element is added to exactly once."""
    monkeypatch.setattr(
        triton_impl, "_blocks", lambda _: {"BLOCK_OUT": 16, "BLOCK_IN": 16, "BLOCK_ROWS": 16, "GROUP": 4}
    )
    main = torch.zeros(170, 40)
    triton_impl.accumulate(main, torch.ones(5, 170), torch.ones(5, 40))
    assert (main == 5.0).all()


@pytest.mark.parametrize("dtype", INTERPRETED)
def test_no_access_outside_the_tensors(dtype, monkeypatch):
    addresses = Addresses(monkeypatch)
    dy, x = (addresses.bordered(torch.randn(67, n).to(dtype)) for n in (35, 70))
    main = addresses.allow(torch.zeros(35, 70))
    triton_impl.accumulate(main, dy, x)
    torch.testing.assert_close(main, dy.float().t() @ x.float(), rtol=1e-5, atol=1e-4)
    assert addresses.num_checked >= 2 * main.numel() + dy.numel() + x.numel()


def test_strided_factors_and_rows_past_2_to_the_31():
    dy = far_rows(20)
    dy.copy_(torch.randn(3, 20))
    x = torch.randn(18, 3).half().t()
    main = torch.zeros(20, 18)
    triton_impl.accumulate(main, dy, x)
    torch.testing.assert_close(main, dy.float().t() @ x.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", [reference, triton_impl])
def test_a_main_gradient_that_is_not_contiguous_is_refused(impl):
    main = torch.zeros(4, 3).t()
    with pytest.raises(ValueError, match=r"strides \(1, 3\)"):
        impl.accumulate(main, torch.ones(2, 3), torch.ones(2, 4))
    assert not main.any()


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="adds into fp32"):
        triton_impl.accumulate(torch.zeros(3, 4, dtype=torch.float64), torch.ones(2, 3), torch.ones(2, 4))


def test_op_uses_the_given_implementation(monkeypatch):
    launches = Launches(monkeypatch, triton_impl, "_accumulate")
    weight = torch.nn.Parameter(torch.ones(3, 4))
    weight.main_grad = torch.ones(3, 4)
    assert accumulate_wgrad(weight, torch.ones(2, 3), torch.ones(2, 4), impl=triton_impl) is None
    assert launches.names == ["_accumulate"]
    assert (weight.main_grad == 3.0).all()


def test_narrow_factors_on_cuda_go_to_addmm_uncast(monkeypatch):
    """What is passed to the GEMM; the dtypes and device that lead there are checked apart."""
    seen = []
    monkeypatch.setattr(reference, "_mixed_gemm", lambda *_: True)
    monkeypatch.setattr(torch, "addmm", lambda *tensors, **options: seen.append((tensors, options)))
    main, dy, x = torch.zeros(3, 4), torch.ones(2, 3).bfloat16(), torch.ones(2, 4).bfloat16()
    reference.accumulate(main, dy, x)
    ((tensors, options),) = seen
    assert tensors[0] is main
    assert options["out"] is main
    assert options["out_dtype"] == torch.float32
    assert [t.dtype for t in tensors[1:]] == [torch.bfloat16] * 2
    assert tensors[1].data_ptr() == dy.data_ptr()


@pytest.mark.gpu
def test_addmm_on_cuda_adds_in_fp32():
    dy, x = (torch.randn(512, n, device="cuda").bfloat16() for n in (96, 64))
    main = torch.randn(96, 64, device="cuda")
    assert reference._mixed_gemm(main, dy, x)
    expected = main.double() + dy.double().t() @ x.double()
    reference.accumulate(main, dy, x)
    assert (main - expected).norm() / expected.norm() <= 5e-6
