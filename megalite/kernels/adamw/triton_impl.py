"""AdamW on flat fp32 tensors in Triton: one pass that reads 16 and writes 12 bytes per parameter, plus the copy.

The scale (clip factor, loss scale) is read from the device, so that no step waits for the host. Bias corrections are
computed in float64 on the host and arrive in fp32. Floor: 28 bytes per parameter, 30 with a 16-bit copy.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels.adamw.hyper import Hyper
from megalite.kernels.compile_cases import CompileCase

BLOCK, NUM_WARPS = 1024, 4

_NUMBERS = ["keep", "beta1", "beta2", "fresh1", "fresh2", "eps", "rate", "unbias"]
"""Floats of a launch, which change from step to step: 1 - lr * decay, the betas, 1 - beta, eps, lr / (1 - beta1^step),
1 / sqrt(1 - beta2^step)."""


@triton.jit(do_not_specialize=_NUMBERS)
def _step(
    main,
    grad,
    exp_avg,
    exp_avg_sq,
    out_copy,
    scale,
    numel,
    keep,
    beta1,
    beta2,
    fresh1,
    fresh2,
    eps,
    rate,
    unbias,
    HAS_COPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < numel
    g = tl.load(grad + element, mask=inside).to(tl.float32) * tl.load(scale).to(tl.float32)
    m = tl.load(exp_avg + element, mask=inside)
    v = tl.load(exp_avg_sq + element, mask=inside)
    p = tl.load(main + element, mask=inside)
    m = beta1 * m + fresh1 * g
    v = beta2 * v + fresh2 * g * g
    p = p * keep - rate * m / (tl.sqrt_rn(v) * unbias + eps)
    tl.store(exp_avg + element, m, mask=inside)
    tl.store(exp_avg_sq + element, v, mask=inside)
    tl.store(main + element, p, mask=inside)
    if HAS_COPY:
        tl.store(out_copy + element, p.to(out_copy.dtype.element_ty), mask=inside)


def step(
    main: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    hyper: Hyper,
    scale: Tensor | float = 1.0,
    out_copy: Tensor | None = None,
) -> None:
    """As reference.step, for fp32.

    Raises:
        ValueError: main or a moment is not fp32.
    """
    if {main.dtype, exp_avg.dtype, exp_avg_sq.dtype} != {torch.float32}:
        raise ValueError(f"adamw in Triton computes in fp32, not {main.dtype}, {exp_avg.dtype}, {exp_avg_sq.dtype}")
    if main.numel() == 0:
        return
    if not isinstance(scale, Tensor):
        scale = torch.full((), scale, dtype=torch.float32, device=main.device)
    _step[(triton.cdiv(main.numel(), BLOCK),)](
        main,
        grad,
        exp_avg,
        exp_avg_sq,
        main if out_copy is None else out_copy,
        scale,
        main.numel(),
        *_numbers(hyper),
        HAS_COPY=out_copy is not None,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )


def _numbers(hyper: Hyper) -> tuple[float, ...]:
    """The launch's _NUMBERS."""
    return (
        1.0 - hyper.lr * hyper.weight_decay,
        hyper.beta1,
        hyper.beta2,
        1.0 - hyper.beta1,
        1.0 - hyper.beta2,
        hyper.eps,
        hyper.lr / (1.0 - hyper.beta1**hyper.step),
        1.0 / math.sqrt(1.0 - hyper.beta2**hyper.step),
    )


def _compile_case(copy: str) -> CompileCase:
    moments = {name: "*fp32" for name in ("main", "grad", "exp_avg", "exp_avg_sq")}
    return CompileCase(
        _step,
        name=f"adamw/{BLOCK}-{copy}",
        signature=moments
        | {"out_copy": f"*{copy}", "scale": "*fp32", "numel": "i64"}
        | dict.fromkeys(_NUMBERS, "fp32"),
        constexprs={"HAS_COPY": copy != "fp32", "BLOCK": BLOCK},
        num_warps=NUM_WARPS,
        attrs=(*moments, "out_copy", "numel"),
        expect={arch: (r"LDG\.E\.\S*128", r"STG\.E\.\S*128") for arch in ("sm_80", "sm_90")},
    )


COMPILE = [_compile_case("bf16"), _compile_case("fp32")]
