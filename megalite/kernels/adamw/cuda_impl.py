"""AdamW in CUDA (csrc/adamw.cu): many runs of elements in one launch, step and scale read from device memory.

Numerics: fp32; the same bits as the C++ kernel of the CPU.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megalite import native
from megalite.kernels.adamw.hyper import Hyper, Tensors
from megalite.kernels.adamw.table import address_table, finish


def problem(device: torch.device, dtype: torch.dtype) -> str:
    """Why it can't run here, or nothing."""
    if device.type != "cuda":
        return f"it needs a CUDA device, and the device is {device.type}"
    if dtype != torch.float32:
        return f"it computes in fp32, and the main params are {dtype}"
    if native.load() is None:
        return f"the extension is missing: {native.why_missing()}"
    return "" if hasattr(native.load(), "adamw_cuda") else "the extension was built without nvcc"


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
    """Every run, up to 48 in one launch, on the current stream."""
    if not tensors:
        return
    device = tensors[0].main.device
    with torch.cuda.device(device):
        # both are filled on the device, so nothing waits; a tensor stays where it is
        step_number = torch.full((), hyper.step, dtype=torch.int64, device=device)
        factor = scale if isinstance(scale, Tensor) else torch.full((), scale, dtype=torch.float32, device=device)
        factor = factor.to(device=device, dtype=torch.float32)
        native.load().adamw_cuda(
            address_table(tensors),
            np.full(len(tensors), hyper.weight_decay),
            (hyper.lr, hyper.beta1, hyper.beta2, hyper.eps),
            step_number.data_ptr(),
            factor.data_ptr(),
            torch.cuda.current_stream(device).cuda_stream,
        )
    finish(tensors)
