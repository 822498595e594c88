"""Which implementation updates the shards and measures their gradients: `optimizer.implementation`.

auto is native on the CPU and cuda, else triton, on a GPU; whatever can't run here falls back to the reference. An
explicit choice that can't be met is an error.
"""

import torch

from megalite.kernels.registry import NAMES, Choice, available, take


def choose(op: str, implementation: str, *, device: torch.device, dtype: torch.dtype) -> Choice:
    """The implementation of `op` (adamw, grad_norm) for main params of `dtype`.

    Raises:
        ValueError: an explicit choice that can't be met, with the reason and what can.
    """
    if implementation == "auto":
        return take(op, device, dtype)
    module, reason = available(op, implementation, device, dtype)
    if module is None:
        ways = " or ".join(["auto", *(n for n in NAMES if available(op, n, device, dtype)[0] is not None)])
        raise ValueError(f"optimizer.implementation={implementation} can't be met for {op}: {reason}; use {ways}")
    return Choice(op, implementation, module, "configured")
