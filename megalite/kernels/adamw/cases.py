"""Cases of AdamW: number of elements; main params, gradient, and moments that fit a run of some steps."""

import torch
from torch import Tensor

from megalite.kernels.adamw import reference
from megalite.kernels.adamw.hyper import Hyper, Tensors
from megalite.kernels.adamw.op import adamw_step
from megalite.kernels.cases import Case, each, randn

HYPER = Hyper(lr=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=7)
SCALE = 0.37


def make_case(num: int, *, dtype: torch.dtype) -> Case:
    """Gradients over many orders of magnitude, zeros among them."""

    def make(generator):
        main, grad, exp_avg, noise = (randn((num,), torch.float64, generator) for _ in range(4))
        grad = (grad.pow(5) * 1e-3).masked_fill(main.abs() < 0.05, 0.0)
        exp_avg_sq = (0.1 * exp_avg).square() + 1e-9 * noise.square()
        return [t.to(dtype) for t in (main, grad, 0.1 * exp_avg, exp_avg_sq)], ()

    return Case(f"{num}", dtype, make, num * (28 if dtype == torch.float32 else 56), 0, flops=12 * num)


def call(*tensors: Tensor, impl=reference, scale: Tensor | float = SCALE, hyper: Hyper = HYPER) -> Tensors:
    """The op on copies of main, grad, exp_avg, exp_avg_sq, with a bf16 copy that starts as NaN."""
    copies = [tensor.detach().clone() for tensor in tensors]
    made = Tensors(*copies, torch.full_like(copies[0], torch.nan, dtype=torch.bfloat16))
    adamw_step([made], hyper, scale=scale, impl=impl)
    return made


def truth(
    main: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, scale: float = SCALE, hyper: Hyper = HYPER
) -> tuple[Tensor, Tensor, Tensor]:
    """The formula, for float64: new main, exp_avg, exp_avg_sq."""
    grad = grad * scale
    exp_avg = hyper.beta1 * exp_avg + (1 - hyper.beta1) * grad
    exp_avg_sq = hyper.beta2 * exp_avg_sq + (1 - hyper.beta2) * grad.square()
    mean = exp_avg / (1 - hyper.beta1**hyper.step)
    spread = (exp_avg_sq / (1 - hyper.beta2**hyper.step)).sqrt() + hyper.eps
    return main * (1 - hyper.lr * hyper.weight_decay) - hyper.lr * mean / spread, exp_avg, exp_avg_sq


CASES = each(make_case, [(0,), (1,), (7,), (8,), (17,), (100,), (4099,)], (torch.float64, torch.float32))
BENCH = each(make_case, [(45_000_000,)], (torch.float32,))
