"""Peaks of known accelerators, and the memory a rank has used.

The peaks are dense bf16 tensor-core rates from the vendor's data sheets (the figure "with sparsity", halved). A device
that is not in the table has no peak: MFU is then absent, never a guess.
"""

import re
import resource
from pathlib import Path

import torch

GIB = 1 << 30
STATUS = Path("/proc/self/status")

_DENSE_BF16_TFLOPS = (
    # (pattern of torch's device name, TFLOP/s), first match wins. NVIDIA data sheets; H100 and H200 NVL and PCIe are
    # slower boards of the same chip, H20 and L4 cut-down ones.
    (r"\bGB200\b", 2500.0),
    (r"\bB200\b", 2250.0),
    (r"\bB100\b", 1750.0),
    (r"\bGH200\b", 989.0),
    (r"\bH200 NVL\b", 836.0),
    (r"\bH[12]00 PCIe\b", 756.0),
    (r"\bH100 NVL\b", 835.0),
    (r"\bH[128]00\b", 989.0),
    (r"\bH20\b", 148.0),
    (r"\bA[18]00\b", 312.0),
    (r"\bA40\b", 149.7),
    (r"\bA30\b", 165.0),
    (r"\bA10\b", 125.0),
    (r"\bL40S\b", 362.0),
    (r"\bL40\b", 181.0),
    (r"\bL4\b", 121.0),
    (r"\bRTX 4090\b", 165.2),
    (r"\bRTX 3090\b", 71.0),
)


def peak_flops(device_name: str, *, compute: str = "bf16") -> float | None:
    """Dense peak of a device in FLOP/s, by the name torch gives it; None when unknown, or when compute is not bf16."""
    if compute != "bf16":
        return None
    matches = (tflops for pattern, tflops in _DENSE_BF16_TFLOPS if re.search(pattern, device_name, re.IGNORECASE))
    tflops = next(matches, None)
    return None if tflops is None else tflops * 1e12


def device_name(device: torch.device) -> str:
    """The name that `peak_flops` looks up."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_memory_gb(device: torch.device) -> float:
    """Most memory held so far, in GiB: allocated tensors on a GPU, the process's resident set on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    if STATUS.exists():  # ru_maxrss would begin at what the process that started this one held
        return int(re.search(r"VmHWM:\s+(\d+)", STATUS.read_text())[1]) * 1024 / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
