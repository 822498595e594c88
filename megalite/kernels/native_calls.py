"""What the calls of C++ kernels on the CPU share: whether they can run, and how tensors are handed over.

Kernels get addresses, so what they rely on is checked here: fp32 or bf16 on the CPU, rows with contiguous columns.
"""

import torch
from torch import Tensor

from megalite import native
from megalite.kernels.cases import WORDS

DTYPES = (torch.float32, torch.bfloat16)
"""What the kernels of a layer take; they compute in fp32."""


def problem(device: torch.device, dtype: torch.dtype) -> str:
    """Why the kernels of a layer can't run on this device in this compute dtype, or nothing."""
    if device.type != "cpu":
        return f"native kernels run on the CPU, and the device is {device.type}"
    if dtype not in DTYPES:
        return f"native kernels take fp32 and bf16, and precision.compute is {WORDS[dtype]}"
    return missing()


def missing() -> str:
    """Why there is no extension, or nothing."""
    return f"the extension is missing: {native.why_missing()}" if native.load() is None else ""


def as_table(x: Tensor) -> Tensor:
    """x in fp32 and contiguous: what the kernels read beside the activations."""
    return x if x.dtype == torch.float32 and x.is_contiguous() else x.to(torch.float32).contiguous()


def how(*tensors: Tensor) -> dict[str, int]:
    """The arguments `bf16` and `threads` of a call on these activations.

    Raises:
        ValueError: they are not alike, or not what the kernels take.
    """
    dtype, known = tensors[0].dtype, tensors[0].dtype in DTYPES
    for tensor in tensors:
        if not known or tensor.dtype != dtype or not tensor.is_cpu:
            found = ", ".join(f"{t.dtype} on {t.device}" for t in tensors)
            raise ValueError(f"native kernels take fp32 or bf16 tensors of one dtype on the CPU, not {found}")
    return {"bf16": dtype == torch.bfloat16, "threads": torch.get_num_threads()}
