"""AdamW by NVIDIA Apex's FusedAdam (`optimizer.implementation: apex`), where Apex is installed; nothing requires it.

The name `apex` on PyPI belongs to another project, a login toolkit for the Pyramid web framework; it is recognised
without running its code and refused with an explanation.
"""

import importlib
from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from megalite.kernels.adamw import Hyper, Tensors
from megalite.kernels.registry import Choice

INSTALL = "NVIDIA's Apex is installed from source with its CUDA extensions: https://github.com/NVIDIA/apex#installation"


def apex_problem() -> str:
    """Why apex.optimizers.FusedAdam can't be used, or nothing; runs no code of a foreign package."""
    spec = util.find_spec("apex")
    if spec is None:
        return f"Apex is not installed; {INSTALL}"
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / "optimizers").is_dir() for folder in folders):
        return (
            f"the installed `apex`{_described()} is not NVIDIA's: it has no apex.optimizers. PyPI's package of that "
            f"name is another project; pip uninstall apex. {INSTALL}"
        )
    if util.find_spec("amp_C") is None:
        return f"Apex was installed without its CUDA extensions (no amp_C), which FusedAdam needs; {INSTALL}"
    return ""


def _described() -> str:
    """Version and summary of the installed distribution of that name."""
    found = next(iter(metadata.distributions(name="apex")), None)
    if found is None:
        return ""
    return f" {found.version} ({found.metadata.get('Summary', 'no summary')})"


def choose_apex(device: torch.device, dtype: torch.dtype) -> Choice:
    """FusedAdam as an AdamW kernel.

    Raises:
        ValueError: Apex, the device or the dtype is the wrong one.
    """
    reason = apex_problem()
    if not reason and device.type != "cuda":
        reason = f"it needs a CUDA device, and the device is {device.type}"
    if not reason and dtype != torch.float32:
        reason = f"it computes in fp32, and the main params are {dtype}"
    if reason:
        raise ValueError(f"optimizer.implementation=apex can't be met: {reason}; or use optimizer.implementation=auto")
    return Choice("adamw", "apex", ApexAdamW(importlib.import_module("apex.optimizers")), "configured")


class ApexAdamW:
    """The interface of an AdamW kernel over one FusedAdam per weight decay, whose state are the given moments."""

    def __init__(self, optimizers: ModuleType):
        self.fused_adam = optimizers.FusedAdam
        self.by_decay: dict[float, torch.optim.Optimizer] = {}

    def step_all(self, tensors: Sequence[Tensors], *, hyper: Hyper, scale: Tensor | float = 1.0) -> None:
        """One update; the tensors of a weight decay are the same in every call.

        Memory: a scaled copy of the gradient, since FusedAdam takes no scale.
        """
        if hyper.weight_decay not in self.by_decay:
            self.by_decay[hyper.weight_decay] = self._make(tensors, hyper)
        optimizer = self.by_decay[hyper.weight_decay]
        (group,) = optimizer.param_groups
        group.update(lr=hyper.lr, step=hyper.step - 1)  # FusedAdam counts this update itself
        for param, one in zip(group["params"], tensors, strict=True):
            assert param.data_ptr() == one.main.data_ptr(), "other tensors than in the first call"
            param.grad = one.grad * scale
        optimizer.step()
        for param, one in zip(group["params"], tensors, strict=True):
            param.grad = None
            if one.out_copy is not None:
                one.out_copy.copy_(one.main)

    def _make(self, tensors: Sequence[Tensors], hyper: Hyper) -> torch.optim.Optimizer:
        params = [nn.Parameter(one.main) for one in tensors]
        optimizer = self.fused_adam(
            params,
            lr=hyper.lr,
            bias_correction=True,
            betas=(hyper.beta1, hyper.beta2),
            eps=hyper.eps,
            adam_w_mode=True,
            weight_decay=hyper.weight_decay,
        )
        for param, one in zip(params, tensors, strict=True):
            optimizer.state[param] = {"exp_avg": one.exp_avg, "exp_avg_sq": one.exp_avg_sq}
        return optimizer
