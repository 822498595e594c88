"""One implementation of an op against the reference, on the op's small cases: the error rule.

An implementation may be at most twice as far from float64 as the reference in the same dtype, both from the same
rounded inputs, beyond the few roundings in the compute dtype that the case grants. The reference itself may be off by
one rounding to the case's dtype and those.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.kernels.adamw.hyper import Tensors
from megalite.kernels.cases import Case

FACTOR = 2.0
MAX_ERROR = 200
"""Characters of a kernel's own error that are shown."""


@dataclass(frozen=True)
class Error:
    """Largest error of one output or gradient: this implementation's, the reference's, and what the rule allows."""

    what: str
    found: float
    reference: float
    limit: float

    @property
    def ok(self) -> bool:
        """Whether the rule holds; NaN breaks it."""
        return self.found <= self.limit

    def __str__(self) -> str:
        return f"error of {self.what} is {self.found:.3g}, the reference's {self.reference:.3g}, limit {self.limit:.3g}"


@dataclass(frozen=True)
class Outcome:
    """All cases of one op in one dtype. `worst` is the largest error as a share of its limit."""

    num_cases: int
    worst: float
    failures: list[str]


def load_cases(op: str) -> Any:
    """kernels/<op>/cases.py."""
    return importlib.import_module(f"megalite.kernels.{op}.cases")


def check_op(op: str, impl: Any, *, device: torch.device, dtype: torch.dtype) -> Outcome:
    """Run `impl`, an object with the functions of the op's reference, on the cases of one dtype."""
    cases = load_cases(op)
    reference = importlib.import_module(f"megalite.kernels.{op}.reference")
    failures, worst = [], 0.0
    chosen = [case for case in cases.CASES if case.dtype == dtype]
    for case in chosen:
        try:
            errors = measure(cases, case, impl, reference, device=device)
        except Exception as error:  # whatever a kernel raises is this kernel's failure
            failures.append(f"case {case.name}: {type(error).__name__}: {str(error)[:MAX_ERROR]}")
            continue
        worst = max([worst, *(e.found / e.limit for e in errors if e.limit)])
        failures += [f"case {case.name}: {e}" for e in errors if not e.ok]
    return Outcome(len(chosen), worst, failures)


def measure(cases: Any, case: Case, impl: Any, reference: Any, *, device: torch.device) -> list[Error]:
    """The errors of every output and gradient of one case."""
    ours, theirs = (_outcome(cases, case, device, impl=which) for which in (impl, reference))
    truth = _truth(cases, case, device, ours)
    allowance = case.roundings * torch.finfo(case.compute).eps
    errors = []
    for what, exact in truth.items():
        if ours[what].shape != exact.shape or ours[what].dtype != theirs[what].dtype:
            raise ValueError(f"{what} is {tuple(ours[what].shape)} {ours[what].dtype}, not {tuple(exact.shape)}")
        near = _distance(theirs[what], exact)
        scale = _scale(exact, theirs)
        base = torch.finfo(case.dtype).eps * scale if impl is reference else FACTOR * near
        errors.append(Error(what, _distance(ours[what], exact), near, base + allowance * scale))
    return errors


def _outcome(cases: Any, case: Case, device: torch.device, *, impl: Any) -> dict[str, Tensor]:
    """Outputs and gradients of the op with this implementation; upstream gradients are the same for all."""
    tensors, rest = case.inputs(device=device)
    outputs = _tuple(cases.call(*tensors, *rest, impl=impl))
    found = {f"output {i}": y.detach().clone() for i, y in enumerate(outputs)}
    return found | _gradients(tensors, outputs, device)


def _truth(cases: Any, case: Case, device: torch.device, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same in float64."""
    tensors, rest = case.inputs(device=device)
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    outputs = _tuple(cases.truth(*wide, *rest))
    found = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    if any(what.startswith("gradient") for what in like):
        found |= _gradients(wide, outputs, device, rounded=[like[what].dtype for what in found])
    return found


def _gradients(
    tensors: list[Tensor],
    outputs: tuple[Tensor, ...],
    device: torch.device,
    *,
    rounded: list[torch.dtype] | None = None,
) -> dict[str, Tensor]:
    """Gradients for normal upstream gradients, rounded to the dtypes of the outputs of the implementation."""
    if not any(y.requires_grad for y in outputs):
        return {}
    dtypes = rounded or [y.dtype for y in outputs]
    generator = torch.Generator().manual_seed(1)
    upstream = [
        torch.randn(y.shape, generator=generator, dtype=torch.float64).to(dtype).to(device, y.dtype)
        for y, dtype in zip(outputs, dtypes, strict=True)
    ]
    grads = torch.autograd.grad(outputs, tensors, upstream, allow_unused=True)
    return {f"gradient {i}": grad for i, grad in enumerate(grads) if grad is not None}


def _tuple(outputs: Any) -> tuple[Tensor, ...]:
    if isinstance(outputs, Tensors):
        return outputs.main, outputs.exp_avg, outputs.exp_avg_sq
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _distance(found: Tensor, exact: Tensor) -> float:
    return (found.double() - exact).abs().max().item() if exact.numel() else 0.0


def _scale(exact: Tensor, outcome: dict[str, Tensor]) -> float:
    """Gradients are sums of terms of the size of the upstream ones (about 1) times the values, which may cancel."""
    values = [exact, *outcome.values()]
    return max((float(x.abs().max()) for x in values if x.numel()), default=0.0)
