"""What one kernel case is: sizes and dtype, its inputs, and what it must move and compute; for tests and benchmarks.

Each op's `cases.py` has `CASES` (small, odd, for tests), `BENCH` (large), `call` (the op) and `truth` (an independent
formula that autograd differentiates; tests give it the same rounded inputs in float64).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WORDS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Dtypes as configs and commands spell them."""


@dataclass(frozen=True)
class Case:
    """One set of sizes in one dtype.

    make:      generator -> (differentiable tensors, other arguments) of the op.
    forward_bytes, backward_bytes: what must at least be read and written.
    flops: of forward and backward together.
    roundings: relative error in units of the compute dtype's epsilon, beyond one rounding to `dtype`.
    """

    name: str
    dtype: torch.dtype
    make: Callable[[torch.Generator], tuple[list[Tensor], tuple[Any, ...]]]
    forward_bytes: int
    backward_bytes: int
    flops: int = 0
    roundings: int = 32

    @property
    def compute(self) -> torch.dtype:
        """The dtype of the arithmetic."""
        return torch.promote_types(self.dtype, torch.float32)

    def inputs(self, seed: int = 0, *, device: torch.device | str = "cpu") -> tuple[list[Tensor], tuple[Any, ...]]:
        """The differentiable tensors, as leaves, and the other arguments; drawn on the device."""
        with torch.device(device):
            tensors, rest = self.make(torch.Generator(device).manual_seed(seed))
        moved = tuple(value.to(device) if isinstance(value, Tensor) else value for value in rest)
        return [tensor.to(device).detach().requires_grad_() for tensor in tensors], moved


def randn(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Normal numbers rounded to `dtype`."""
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def grid_numbers(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Normal numbers on a grid of 1/16 within +-3.75: the sum of two is exact in any of DTYPES."""
    return torch.randn(shape, generator=generator).mul_(16).round_().clamp_(-60, 60).div_(16).to(dtype)


def each(
    make_case: Callable[..., Case], sizes: list[tuple[int, ...]], dtypes: tuple[torch.dtype, ...] = DTYPES
) -> list[Case]:
    """All sizes in all dtypes."""
    return [make_case(*size, dtype=dtype) for size in sizes for dtype in dtypes]
