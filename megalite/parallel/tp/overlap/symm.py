"""Fused kernels over a symmetric heap: the transfer of a tp linear runs inside its GEMM.

With sequence parallel AG+GEMM and GEMM+RS, without it GEMM+AR. Channels are made at the first call of each shape, in
the same order on all ranks. A product or a sum is rounded as in `none`, and the ledger counts the same bytes.
Memory: per shape of call two symmetric tensors and, where sums are made, one to pull into; they are kept.
"""

from collections.abc import Callable
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.comm.symmetric import Heap, open_heap, shm_missing, symmetric_missing
from megalite.kernels.registry import interpreting, load, triton_missing
from megalite.kernels.signals import Failures
from megalite.mesh import Group
from megalite.parallel.tp.overlap.base import T
from megalite.parallel.tp.overlap.symm_call import Channel, Push, Setting
from megalite.parallel.tp.rows import TensorParallel, check_divisible

GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INTERPRETER_DTYPES = (torch.float64, torch.float32, torch.float16)


def symm_missing(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why `symm` can't run on this device in this compute dtype, or None; the same on all ranks of a job."""
    if reason := triton_missing():
        return reason
    if device.type == "cpu" and not interpreting():
        return "its kernels need a GPU, or on the CPU Triton's interpreter (TRITON_INTERPRET=1, slow: for tests)"
    if device.type == "cpu" and dtype not in INTERPRETER_DTYPES:
        return f"Triton's interpreter is silently wrong in {_word(dtype)}; use precision.compute=fp32 on the CPU"
    if device.type == "cuda" and dtype not in GPU_DTYPES:
        return f"its kernels sum in fp32, and precision.compute is {_word(dtype)}"
    return (shm_missing if device.type == "cpu" else symmetric_missing)(device)


def open_symm(group: Group, *, device: torch.device, dtype: torch.dtype, timeout_s: float) -> "SymmOverlap":
    """The backend over a new heap of the tp group; collective.

    Args:
        dtype:     precision.compute.
        timeout_s: about how long a kernel waits for a peer.

    Raises:
        ValueError: it can't run here, with the reason and the way out.
    """
    if reason := symm_missing(device, dtype):
        raise ValueError(f"overlap.backend=symm is not possible: {reason}; use overlap.backend=auto, chunked or none")
    return SymmOverlap(open_heap(group, device=device, timeout_s=timeout_s), ranks=group.ranks, timeout_s=timeout_s)


class SymmOverlap:
    """The backend `symm` of one tp group. All ranks call it in the same order with the same shapes."""

    name = "symm"

    def __init__(self, heap: Heap, *, ranks: tuple[int, ...], timeout_s: float, share: int = 1):
        """`ranks` are the group's global ranks, `share` of which run on this device at the same time."""
        self.heap = heap
        failures = Failures(heap.device, ranks=ranks, timeout_s=timeout_s)
        self.setting = Setting(heap, _kernels("signals"), failures, timeout_s, share)
        self.push = Push(heap.device)
        self.channels: dict[tuple, Channel] = {}

    def gather_gemm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, tp: TensorParallel, site: str
    ) -> tuple[Tensor, Tensor]:
        """See Overlap."""
        if not tp.sequence_parallel:
            return F.linear(x, weight, bias), x
        return self._gather(x, weight, bias, tp=tp, site=site, transposed=False)

    def gemm_reduce(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, tp: TensorParallel, site: str) -> Tensor:
        """See Overlap."""
        if tp.size == 1:
            return F.linear(x, weight, bias)
        return self._reduce(x, weight, bias, tp=tp, site=site, transposed=False)

    def dgrad_reduce(
        self, dy: Tensor, weight: Tensor, *, tp: TensorParallel, site: str, meanwhile: Callable[[], T]
    ) -> tuple[Tensor, T]:
        """See Overlap: the sum is under dx's own product, so `meanwhile` comes after."""
        dx = dy.mm(weight) if tp.size == 1 else self._reduce(dy, weight, None, tp=tp, site=site, transposed=True)
        return dx, meanwhile()

    def gather_dgrad(
        self, dy: Tensor, weight: Tensor, *, tp: TensorParallel, site: str, meanwhile: Callable[[Tensor], T]
    ) -> tuple[Tensor, T]:
        """See Overlap."""
        if not tp.sequence_parallel:
            return dy.mm(weight), meanwhile(dy)
        dx, full = self._gather(dy, weight, None, tp=tp, site=site, transposed=True)
        return dx, meanwhile(full)

    def close(self) -> None:
        """See Overlap: forget the buffers; an error is a wait that gave up."""
        torch.get_device_module(self.heap.device).synchronize()
        self.setting.failures.check()
        self.channels.clear()
        self.heap.close()

    def _gather(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, tp: TensorParallel, site: str, transposed: bool
    ) -> tuple[Tensor, Tensor]:
        """All rows times the weight, and a copy of all rows, which may be kept: peers write their buffer again."""
        tp.group.ledger.record(tp.group.axis, "all_gather", site, (tp.size - 1) * x.nbytes)
        x, weight = x.contiguous(), weight.contiguous()
        rows, width = x.shape
        channel = self._channel("gather", (tp.size * rows, width), x.dtype)
        index = channel.begin()
        sent = self.push.start(x, channel, index)
        gathered = channel.buffer.local[index]
        y = _kernels("gather_gemm").forward(x, gathered, weight, bias, peers=channel.peers, transposed=transposed)
        self.push.join(sent)
        full = torch.cat([gathered[: tp.rank * rows], x, gathered[(tp.rank + 1) * rows :]])
        channel.finish()
        return y, full

    def _reduce(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, tp: TensorParallel, site: str, transposed: bool
    ) -> Tensor:
        """Own rows of the sum over ranks with sequence parallel, which travels once; else all rows, which take two."""
        check_divisible(x.shape[0], tp)
        x, weight = x.contiguous(), weight.contiguous()
        rows, width = x.shape[0], weight.shape[1 if transposed else 0]
        segment = -(-rows // tp.size)
        if tp.sequence_parallel:
            op, kernels, trips, shape = "reduce_scatter", "gemm_scatter", 1, (rows, width)
        else:
            op, kernels, trips, shape = "all_reduce", "gemm_all_reduce", 2, (2, tp.size * segment, width)
        sent = trips * (tp.size - 1) * rows * width * x.itemsize // tp.size
        tp.group.ledger.record(tp.group.axis, op, site, sent)
        channel = self._channel(op, shape, x.dtype, staging=(tp.size - 1, segment, width))
        index = channel.begin()
        y = _kernels(kernels).forward(
            x,
            weight,
            bias,
            buffer=channel.buffer.local[index],
            staging=channel.staging,
            pointers=channel.buffer.pointers[index],
            peers=channel.peers,
            transposed=transposed,
        )
        channel.finish()
        return y

    def _channel(
        self, kind: str, shape: tuple[int, ...], dtype: torch.dtype, *, staging: tuple[int, ...] | None = None
    ) -> Channel:
        key = (kind, shape, dtype)
        if key not in self.channels:
            self.channels[key] = Channel(self.setting, shape, dtype, staging=staging)
        return self.channels[key]


def _kernels(op: str) -> ModuleType:
    module, reason = load(op, "triton")
    assert module is not None, reason
    return module


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
