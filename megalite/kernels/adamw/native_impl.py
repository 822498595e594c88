"""AdamW on the CPU in C++ (csrc/adamw_cpu.cpp): one pass, AVX2 or AVX-512 as the machine has, torch's thread count.

Numerics: fp32; every vector level and number of threads gives the same bits.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megalite import native
from megalite.kernels.adamw.hyper import Hyper, Tensors
from megalite.kernels.adamw.table import address_table, finish
from megalite.kernels.native_calls import missing


def problem(device: torch.device, dtype: torch.dtype) -> str:
    """Why it can't run here, or nothing."""
    if device.type != "cpu":
        return f"it runs on the CPU, and the device is {device.type}"
    if dtype != torch.float32:
        return f"it computes in fp32, and the main params are {dtype}"
    return missing()


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
    """As reference.step."""
    step_all([Tensors(main, grad, exp_avg, exp_avg_sq, out_copy)], hyper=hyper, scale=scale)


def step_all(tensors: Sequence[Tensors], *, hyper: Hyper, scale: Tensor | float = 1.0) -> None:
    """Every run, one after the other; threads share the elements of a run."""
    native.load().adamw(
        address_table(tensors),
        np.full(len(tensors), hyper.weight_decay),
        (hyper.lr, hyper.beta1, hyper.beta2, hyper.eps),
        hyper.step,
        float(scale),
        torch.get_num_threads(),
    )
    finish(tensors)
