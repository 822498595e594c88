"""Initial values as a pure function of (seed, logical name, global element index).

Invariant: every layout starts from the bits that one device would draw. A local parameter is filled box by box;
padding is zero. On a GPU the numbers are drawn by the Triton kernel, if it is there.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from megalite.kernels.philox import fill_normal, stream_key
from megalite.kernels.registry import take
from megalite.parallel.spec import ParamSpec, Part


def init_tensor(
    spec: ParamSpec, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device | str, seed: int
) -> Tensor:
    """The initial local parameter of `shape`: its parts one below the other, then rows of zeros.

    Numerics: normal numbers are drawn in float64 and rounded once to `dtype`.
    """
    out = torch.zeros(shape, dtype=dtype, device=device)
    philox = take("philox", out.device, torch.float32).module  # it draws in float64, whatever the dtype of `out`
    row = 0
    for part in spec.parts:
        box = out[row : row + part.shape[0]]
        row += part.shape[0]
        if spec.init == "ones":
            box.fill_(1.0)
        elif spec.init == "normal":
            _fill_box(box, part, spec.init_std, seed=seed, philox=philox)
    assert row <= shape[0], f"{spec.parts[0].name}: the parts have {row} rows, the parameter {shape[0]}"
    return out


def _fill_box(box: Tensor, part: Part, std: float, *, seed: int, philox: Any) -> None:
    key = stream_key(seed, "init", part.name)
    if part.shape[1:] == part.global_shape[1:]:  # whole rows: consecutive elements
        width = prod(part.global_shape[1:])
        fill_normal(box, key, start=part.start[0] * width, std=std, impl=philox)
        return
    assert len(part.shape) == 2, f"{part.name}: only matrices are split along dim 1"
    for i, line in enumerate(box):
        start = (part.start[0] + i) * part.global_shape[1] + part.start[1]
        fill_normal(line, key, start=start, std=std, impl=philox)


def materialize(module: nn.Module, *, seed: int, device: torch.device | str = "cpu") -> None:
    """Replace all meta parameters of `module` by initialised ones; a shared parameter stays shared. For one module,
    without ZeRO."""
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, param in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if id(param) not in made:
                value = init_tensor(param.spec, tuple(param.shape), dtype=param.dtype, device=device, seed=seed)
                made[id(param)] = nn.Parameter(value)
                made[id(param)].spec = param.spec
            setattr(owner, name, made[id(param)])
