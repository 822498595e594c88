"""All ops and all their implementations, for tables, checks and benchmarks.

A config selects the model's ops one by one (registry.py) and the optimizer's together (adamw/select.py).
"""

from typing import Any

import torch

from megalite.kernels.adamw.select import NAMES, choose, why_not
from megalite.kernels.registry import OPS, Selection, available, load

OPTIMIZER_OPS = ("adamw", "grad_norm")
ALL_OPS = (*OPS, *OPTIMIZER_OPS)
ALL_NAMES = NAMES
"""reference, native (C++ on the CPU), triton, cuda."""


def find(op: str, name: str, device: torch.device, dtype: torch.dtype) -> tuple[Any, str]:
    """Implementation `name` of `op` if it runs on this device in this dtype, else None and the reason."""
    if op not in OPTIMIZER_OPS:
        return available(op, name, device, dtype)
    reason = why_not(op, name, device, dtype)
    return (None, reason) if reason else (load(op, name)[0], "")


def taken(op: str, selection: Selection, device: torch.device, main: torch.dtype) -> str:
    """What `auto` takes: the implementation's name, or - for an op that no model uses by itself."""
    if op in OPTIMIZER_OPS:
        return choose(op, "auto", device=device, dtype=main).name
    return selection.choices[op].name if op in selection.choices else "-"
