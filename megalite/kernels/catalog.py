"""All ops and all their implementations, for tables, checks and benchmarks.

A config selects the model's ops one by one (registry.py) and the optimizer's together (adamw/select.py).
"""

import torch

from megalite.kernels.registry import NAMES, OPS, Selection, take

OPTIMIZER_OPS = ("adamw", "grad_norm")
ALL_OPS = (*OPS, *OPTIMIZER_OPS)
ALL_NAMES = NAMES
"""reference, native (C++ on the CPU), triton, cuda."""


def taken(op: str, selection: Selection, device: torch.device, main: torch.dtype) -> str:
    """What `auto` takes: the implementation's name, or - for an op that no model uses by itself."""
    if op in OPTIMIZER_OPS:
        return take(op, device, main).name
    return selection.choices[op].name if op in selection.choices else "-"
