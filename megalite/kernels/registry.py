"""Which implementation of each op a run uses: decided once, when the model is built, and shown as a table.

Implementations of op X are modules of pure functions with the signatures of kernels/X/reference.py: native_impl.py
(C++ on the CPU), triton_impl.py, cuda_impl.py in kernels/X, or an object of the user's. Only this file imports them,
and only it guards imports: what is missing becomes a reason. A module may say where it runs, in `problem(device,
dtype)`. `auto` never fails; an explicit choice that can't be met is an error.
Invariant: a choice depends on the config, the device's kind and what is installed, so all ranks of a job agree.
"""

import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

import torch

from megalite.config.schema import Kernels
from megalite.kernels.cases import WORDS
from megalite.kernels.check import check_op

SELECTED = tuple(Kernels.model_fields)
"""Ops that a config selects, in the order of the tables."""
OPS = (*SELECTED, "cross_entropy")
"""With those that no model uses by itself: linear_cross_entropy is built of cross_entropy's kernels."""
NAMES = ("reference", "native", "triton", "cuda")
"""What a config may say."""
ORDER = {"cpu": ("native",), "cuda": ("cuda", "triton")}
"""What auto tries on a device, before the reference; Triton's interpreter is a test's business, never auto's."""
AUTO_REFERENCE = {
    "attention": "torch's scaled_dot_product_attention is fused there",
    "wgrad": "torch.addmm(out_dtype=fp32), the library's GEMM, is faster",
}
"""Ops whose reference is the fast path of a GPU too, and why."""
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Choice:
    """One op's implementation. `name` is a word of NAMES or `package.module:object`; `why` is for people."""

    op: str
    name: str
    module: Any
    why: str


@dataclass(frozen=True)
class Selection:
    """The choice for every op; `selection["rmsnorm"]` is its module of pure functions."""

    choices: Mapping[str, Choice] = field(default_factory=dict)

    def __getitem__(self, op: str) -> Any:
        return self.choices[op].module

    def table(self) -> str:
        """One line per implementation and reason: `reference: rmsnorm, rope (cpu: ...)`."""
        groups: dict[tuple[str, str], list[str]] = {}
        for choice in self.choices.values():
            groups.setdefault((choice.name, choice.why), []).append(choice.op)
        return "\n".join(f"{name}: {', '.join(ops)} ({why})" for (name, why), ops in groups.items())


@cache
def load(op: str, name: str) -> tuple[ModuleType | None, str]:
    """Implementation `name` of `op`, or None and the reason."""
    module = f"megalite.kernels.{op}.{name if name == 'reference' else f'{name}_impl'}"
    if importlib.util.find_spec(f"megalite.kernels.{op}") is None or importlib.util.find_spec(module) is None:
        return None, f"{op} has no {name} implementation"
    if name == "triton" and (missing := triton_missing()):
        return None, missing
    try:
        return importlib.import_module(module), ""
    except ImportError as error:
        return None, f"it can't be imported: {error}"


@cache
def triton_missing() -> str:
    """Why Triton can't be imported, or nothing."""
    try:
        version = importlib.import_module("triton").__version__
    except ImportError as error:
        return f"Triton is not installed ({error}; pip install 'triton>=3.6')"
    if tuple(int(part) for part in version.split(".")[:2]) < (3, 6):
        return f"Triton {version} is too old; pip install 'triton>=3.6'"
    return ""


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter (TRITON_INTERPRET=1), which needs no GPU."""
    return not triton_missing() and bool(importlib.import_module("triton").knobs.runtime.interpret)


def available(op: str, name: str, device: torch.device, dtype: torch.dtype) -> tuple[Any, str]:
    """Implementation `name` of `op` if it runs on this device in this compute dtype, else None and the reason."""
    module, reason = load(op, name)
    if module is None or name == "reference":
        return module, reason
    if hasattr(module, "problem"):
        reason = module.problem(device, dtype)
        return (None, reason) if reason else (module, "")
    if dtype not in TRITON_DTYPES:
        return None, f"{name} kernels compute in fp32, and precision.compute is {WORDS[dtype]}"
    if device.type == "cuda":
        return module, ""
    if name == "triton" and interpreting():
        if dtype == torch.bfloat16:
            return None, "Triton's interpreter is silently wrong in bf16"
        return module, ""
    hint = " or TRITON_INTERPRET=1, which is slow" if name == "triton" else ""
    return None, f"{name} kernels need a GPU{hint}; the device is {device.type}"


def select(kernels: Kernels, device: torch.device, dtype: torch.dtype) -> Selection:
    """Decide every op.

    Args:
        dtype: the compute dtype, precision.compute.

    Raises:
        ValueError: every explicit choice that can't be met, each with its reason and a way out.
    """
    choices, problems = {}, []
    for op, wanted in kernels:
        try:
            choices[op] = _choose(op, wanted, device, dtype)
        except ValueError as error:
            problems.append(str(error))
    if not problems:
        problems += _one_rotates(choices, kernels)
    if problems:
        raise ValueError("\n  ".join(problems))
    return Selection(choices)


def _one_rotates(choices: dict[str, Choice], kernels: Kernels) -> list[str]:
    """An attention that rotates q and k by itself leaves an explicit kernels.rope nothing to do: auto then takes the
    reference, and an explicit attention is a problem."""
    found = choices["attention"]
    if kernels.rope == "auto" or not getattr(found.module, "ROTATES", False):
        return []
    if kernels.attention == "auto":
        why = f"auto: {found.name} rotates q and k by itself, and kernels.rope={kernels.rope} shall"
        choices["attention"] = Choice("attention", "reference", load("attention", "reference")[0], why)
        return []
    return [
        f"kernels.rope={kernels.rope} has no effect with kernels.attention={kernels.attention}, which rotates q and k "
        "by itself; use kernels.rope=auto or kernels.attention=reference"
    ]


def _choose(op: str, wanted: str, device: torch.device, dtype: torch.dtype) -> Choice:
    if wanted == "auto":
        return take(op, device, dtype)
    if ":" in wanted:
        return Choice(op, wanted, _external(op, wanted, device, dtype), "configured, checked against the reference")
    module, reason = available(op, wanted, device, dtype)
    if module is None:
        raise ValueError(f"kernels.{op}={wanted} can't be met: {reason}; use {_ways(op, device, dtype)}")
    return Choice(op, wanted, module, "configured")


def take(op: str, device: torch.device, dtype: torch.dtype) -> Choice:
    """What auto takes: the first of ORDER that runs, else the reference, with the reasons."""
    if device.type == "cuda" and op in AUTO_REFERENCE:
        return Choice(op, "reference", load(op, "reference")[0], f"auto: {AUTO_REFERENCE[op]}")
    reasons = []
    for name in (*ORDER.get(device.type, ()), "reference"):
        module, reason = available(op, name, device, dtype)
        if module is not None:
            why = "; ".join(["auto", *reasons])
            if name == "reference" and device.type != "cuda" and not reasons:
                why = f"auto: the device is {device.type}"
            return Choice(op, name, module, why)
        reasons += _of_installation([reason])
    raise AssertionError(f"{op} has no reference")


def _of_installation(reasons: Iterable[str]) -> list[str]:
    """Reasons that a user can do something about."""
    return [reason for reason in reasons if not reason.endswith(" implementation")]


def _ways(op: str, device: torch.device, dtype: torch.dtype) -> str:
    names = [name for name in NAMES if available(op, name, device, dtype)[0] is not None]
    return " or ".join(["auto", *names])


def required(op: str) -> tuple[str, ...]:
    """The functions that an implementation of `op` offers: those that its op.py calls on it."""
    source = inspect.getsource(importlib.import_module(f"megalite.kernels.{op}.op"))
    return tuple(sorted(set(re.findall(r"\bimpl\.(\w+)\(", source))))


def _external(op: str, path: str, device: torch.device, dtype: torch.dtype) -> Any:
    """The user's object, checked on small cases.

    Raises:
        ValueError: it can't be imported, lacks a function, fails, or differs from the reference.
    """
    where = f"kernels.{op}={path}"
    way_out = f"correct it or use kernels.{op}=auto"
    module, _, attributes = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{where} can't be imported: {error}; is it on PYTHONPATH? {way_out}") from None
    missing = [name for name in required(op) if not callable(getattr(found, name, None))]
    if missing:
        raise ValueError(
            f"{where} lacks {', '.join(missing)}: it needs {', '.join(required(op))} as in "
            f"megalite/kernels/{op}/reference.py; {way_out}"
        )
    wrong = check_op(op, found, device=device, dtype=dtype).failures
    if wrong:
        raise ValueError(f"{where} differs from the reference: {wrong[0]} ({len(wrong)} failures); {way_out}")
    return found
