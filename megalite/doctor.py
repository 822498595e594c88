"""What this machine has for megalite: what was built, what runs, and for what does not, why and what to do.

Every probe returns findings and never raises; nothing here is needed to train on a CPU, so `megalite doctor` is for
reading and always ends with exit code 0.
"""

import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

import torch
import torch.distributed as dist

from megalite import native
from megalite.comm.segment import SHM_DIR, free_bytes, shared_memory_missing
from megalite.comm.symmetric import symmetric_missing
from megalite.config.schema import Kernels
from megalite.kernels.registry import interpreting, select, triton_missing
from megalite.observe.hardware import peak_flops
from megalite.optim.apex import apex_problem

GIB = 1 << 30
MIN_CAPABILITY = (8, 0)
ROOM_BYTES = 64 << 20
"""In /dev/shm, with which 8 CPU ranks in any mesh get segments of full size."""
OPTIONAL = {"tensorboard": "run.tensorboard=true", "liger_kernel": "a column of `megalite kernels bench`"}


@dataclass(frozen=True)
class Finding:
    """One line. `absent` is fine on many machines; `problem` is something that was probably meant to work."""

    state: Literal["ok", "absent", "problem"]
    name: str
    text: str
    hint: str = ""


def report() -> str:
    """Everything, for a terminal."""
    lines = [f"megalite {_version('megalite')} on {platform.platform()}, Python {platform.python_version()}", ""]
    for finding in findings():
        lines.append(f"  {finding.state:7}  {finding.name:12}  {finding.text}")
        if finding.hint:
            lines.append(f"{'':25}-> {finding.hint}")
    device, dtype = _device(), torch.bfloat16
    lines += ["", f"Kernels that `auto` takes on {device.type} in bf16 (`megalite kernels list` says more):"]
    lines += [f"  {line}" for line in select(Kernels(), device, dtype).table().splitlines()]
    return "\n".join(lines)


def findings() -> list[Finding]:
    """All probes, in the order of the report."""
    probes: tuple[Callable[[], Iterator[Finding]], ...] = (_torch, _gpus, _triton, _extension, _collectives, _packages)
    return [finding for probe in probes for finding in probe()]


def _torch() -> Iterator[Finding]:
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("ok", "torch", f"{torch.__version__}, {built}; {cores} CPU cores, {torch.get_num_threads()} threads")


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield no_gpu(torch.version.cuda, has_driver=shutil.which("nvidia-smi") is not None, error=_cuda_error())
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        yield gpu(f"gpu {index}", properties.name, properties.total_memory, capability)


def gpu(which: str, name: str, memory_bytes: int, capability: tuple[int, int]) -> Finding:
    """What megalite makes of one GPU."""
    text = f"{name}, {memory_bytes / GIB:.0f} GiB, compute capability {capability[0]}.{capability[1]}"
    if capability < MIN_CAPABILITY:
        return Finding("problem", which, text, "bf16 kernels need 8.0 (A100) or newer; use precision.compute=fp32")
    peak = peak_flops(name)
    if peak is None:
        return Finding("ok", which, f"{text}; its peak is not known, so metrics have no MFU")
    return Finding("ok", which, f"{text}, {peak / 1e12:g} TFLOP/s dense bf16")


def no_gpu(cuda: str | None, *, has_driver: bool, error: str) -> Finding:
    """Why torch sees no GPU.

    Args:
        cuda:       the CUDA version that torch was built for, or None.
        has_driver: whether nvidia-smi is installed.
        error:      what CUDA says when it is started.
    """
    if cuda is None and has_driver:
        hint = "this machine has an NVIDIA driver: install a CUDA build of torch (https://pytorch.org/get-started)"
        return Finding("problem", "gpu", "torch was built without CUDA", hint)
    if cuda is None:
        return Finding("absent", "gpu", "none: torch was built without CUDA; training runs on the CPU")
    if "too old" in error:
        return Finding("problem", "gpu", f"the driver is too old for CUDA {cuda}: {error}", "update the NVIDIA driver")
    if not has_driver:
        return Finding("absent", "gpu", "none: no NVIDIA driver (no nvidia-smi); training runs on the CPU")
    hint = "look at nvidia-smi; in a container, start it with --gpus all; CUDA_VISIBLE_DEVICES may hide GPUs"
    return Finding("problem", "gpu", f"there is a driver, but torch sees no GPU: {error or 'no error'}", hint)


def _cuda_error() -> str:
    if torch.version.cuda is None:
        return ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return ""


def _triton() -> Iterator[Finding]:
    missing = triton_missing()
    if missing:
        yield Finding("absent", "triton", f"{missing}: GPU kernels fall back to the reference")
    elif interpreting():
        yield Finding("problem", "triton", f"{_version('triton')} in its interpreter", "unset TRITON_INTERPRET")
    else:
        on = "compiles kernels for the GPU" if torch.cuda.is_available() else "is used once there is a GPU"
        yield Finding("ok", "triton", f"{_version('triton')}, {on}")


def _extension() -> Iterator[Finding]:
    yield extension(native.build_info(), native.why_missing())


def extension(info: dict, missing: str | None) -> Finding:
    """The compiled part.

    Args:
        info:    what the build recorded.
        missing: why it can't be imported, or None.
    """
    again = "then pip install again (make test does)"
    if missing:
        if not info.get("compiler"):
            return Finding("absent", "extension", missing, f"it is optional; for it install g++ or clang++, {again}")
        return Finding("problem", "extension", missing, f"it is optional, but {info['compiler']} is there: {again}")
    host = f"CPU parts built by {info.get('compiler')}"
    if info.get("cuda"):
        return Finding("ok", "extension", f"{host}, CUDA parts by {info['nvcc']}")
    if info.get("error"):
        return Finding("problem", "extension", f"{host}; CUDA parts failed: {info['error']}", again)
    if info.get("nvcc"):
        return Finding("ok", "extension", f"{host}; no CUDA parts, although there is {info['nvcc']}", again)
    return Finding("ok", "extension", f"{host}; no CUDA parts: no nvcc on the PATH or below CUDA_HOME")


def _collectives() -> Iterator[Finding]:
    if not dist.is_available():
        yield Finding("problem", "collectives", "torch was built without torch.distributed", "runs have one rank only")
        return
    gloo = "gloo for CPU ranks" if dist.is_gloo_available() else "no gloo, so no CPU ranks"
    if not dist.is_nccl_available():
        yield Finding("ok" if dist.is_gloo_available() else "problem", "collectives", f"{gloo}; no NCCL in this torch")
    else:
        version = ".".join(str(part) for part in torch.cuda.nccl.version()) if torch.cuda.is_available() else "present"
        yield Finding("ok", "collectives", f"{gloo}; NCCL {version} for GPU ranks")
    yield shared_memory(shared_memory_missing(), free_bytes())
    missing = symmetric_missing(_device())
    yield Finding("absent" if missing else "ok", "NVLink heap", missing or "torch's symmetric memory can be used")


def shared_memory(missing: str | None, free_bytes: int) -> Finding:
    """Whether the CPU ranks of this host can share memory.

    Args:
        missing:    why not, or None.
        free_bytes: in /dev/shm.
    """
    name, fall_back = "shared mem.", "collectives of CPU ranks go through gloo"
    if missing:
        return Finding("absent", name, f"{missing}: {fall_back}")
    text = f"{free_bytes >> 20} MiB free in {SHM_DIR} for collectives of CPU ranks"
    if free_bytes < ROOM_BYTES:
        hint = f"{ROOM_BYTES >> 20} MiB are comfortable, less is slower (docker run --shm-size=256m)"
        return Finding("problem", name, text, hint)
    return Finding("ok", name, text)


def _packages() -> Iterator[Finding]:
    apex = apex_problem()
    if not apex:
        yield Finding("ok", "apex", "NVIDIA's, for optimizer.implementation=apex")
    else:
        yield Finding("absent" if "not installed" in apex else "problem", "apex", apex)
    for package, use in OPTIONAL.items():
        version = _version(package)
        text = f"{version}, for {use}" if version else f"not installed; only needed for {use}"
        yield Finding("ok" if version else "absent", package, text)


def _version(package: str) -> str:
    """The installed version, or nothing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
