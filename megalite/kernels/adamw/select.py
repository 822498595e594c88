"""Which implementation updates the shards and measures their gradients: `optimizer.implementation`.

auto is native on the CPU and cuda, else triton, on a GPU; whatever can't run here falls back to the reference. An
explicit choice that can't be met is an error.
"""

import torch

from megalite.kernels.registry import Choice, available, load

ORDER = {"cpu": ("native",), "cuda": ("cuda", "triton")}
"""What auto tries on a kind of device, before the reference."""
NAMES = ("reference", "native", "triton", "cuda")


def why_not(op: str, name: str, device: torch.device, dtype: torch.dtype) -> str:
    """Why implementation `name` of op (adamw, grad_norm) can't run here, or nothing."""
    if name in ("native", "cuda"):
        module, reason = load(op, name)
        return reason if module is None else module.problem(device, dtype)
    module, reason = available(op, name, device, dtype)
    return reason if module is None else ""


def choose(op: str, implementation: str, *, device: torch.device, dtype: torch.dtype) -> Choice:
    """The implementation of `op` for main params of `dtype`.

    Raises:
        ValueError: an explicit choice that can't be met, with the reason and what can.
    """
    if implementation == "auto":
        return _auto(op, device, dtype)
    if reason := why_not(op, implementation, device, dtype):
        ways = " or ".join(["auto", *(n for n in NAMES if not why_not(op, n, device, dtype))])
        raise ValueError(f"optimizer.implementation={implementation} can't be met for {op}: {reason}; use {ways}")
    return Choice(op, implementation, load(op, implementation)[0], "configured")


def _auto(op: str, device: torch.device, dtype: torch.dtype) -> Choice:
    reasons = []
    for name in ORDER.get(device.type, ()):
        reason = why_not(op, name, device, dtype)
        if not reason:
            return Choice(op, name, load(op, name)[0], "; ".join(["auto", *reasons]))
        reasons.append(f"{name}: {reason}")
    return Choice(op, "reference", load(op, "reference")[0], "; ".join(["auto", *reasons]))
