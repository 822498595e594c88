"""What ranks do in the tests of `symm`: calls with fresh data against plain torch, delays, planted faults.

Everything runs in Triton's interpreter over shared memory, the ranks in processes of their own.
"""

import random
import time
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megalite.comm.symmetric import open_heap
from megalite.kernels import gemm_kernels
from megalite.kernels.gather_gemm import reference as gather_reference
from megalite.kernels.gather_gemm import triton_impl as gather_triton
from megalite.kernels.gemm_all_reduce import reference as all_reduce_reference
from megalite.kernels.gemm_all_reduce import triton_impl as all_reduce_triton
from megalite.kernels.gemm_scatter import reference as scatter_reference
from megalite.kernels.gemm_scatter import triton_impl as scatter_triton
from megalite.kernels.signals import triton_impl as signals
from megalite.mesh import Sizes
from megalite.parallel.tp.overlap import symm_call
from megalite.parallel.tp.overlap.symm import SymmOverlap
from megalite.parallel.tp.overlap.symm_call import Channel, Push
from megalite.parallel.tp.rows import TensorParallel
from tests.dist.pool import mesh_for

BEFORE_WRAP = (1 << 31) - 4
"""An epoch from which the fifth call is past what int32 holds."""
FAULT_DELAY_S = 0.25


@dataclass(frozen=True)
class Job:
    """Calls of one op. Sizes are (rows of a rank, or all rows without sequence parallel; N; K), of this rank."""

    op: str
    rows: int
    N: int
    K: int
    dtype: torch.dtype = torch.float32
    bias: bool = True
    sequence_parallel: bool = True
    num_calls: int = 6
    epoch: int = 0
    delays: bool = False
    fault: str = ""
    one_buffer: bool = False
    timeout_s: float = 60.0
    seed: int = 0


def no_wait(*arguments):
    """A planted fault: a gate that is always open."""
    return 0


class SlowPush(Push):
    """Sleeps before each copy, and between a copy and its flag; or sets the flag first."""

    def __init__(self, device, pause, *, flag_first: bool = False):
        super().__init__(device)
        self.pause, self.flag_first = pause, flag_first

    def start(self, rows: Tensor, channel: Channel, index: int):
        self.pause()
        if self.flag_first:
            buffer = channel.buffer
            for peer in range(buffer.size):
                super().publish(buffer.peer_flags[peer][buffer.rank, symm_call.READY], buffer.epoch)
            time.sleep(FAULT_DELAY_S)
        return super().start(rows, channel, index)

    def publish(self, flag: Tensor, epoch: Tensor) -> None:
        self.pause()
        super().publish(flag, epoch)


WAITING = {
    "no READY wait": (gemm_kernels, gather_triton),
    "no RESULT wait": (all_reduce_triton,),
    "no DONE wait": (signals,),
}
"""Fault -> the modules whose gates stand open."""
LATE = {
    "no RESULT wait": (all_reduce_triton, "_push_block"),
    "no DONE wait": (scatter_triton, "pull_segments"),
    "DONE at once": (gather_triton, "wait_flag"),
}
"""Fault -> where rank 0 sleeps, so that the fault shows on a busy machine too."""


@contextmanager
def planted(job: Job, rank: int):
    """Break the named piece of the protocol in this process."""
    patch = pytest.MonkeyPatch()
    for module in WAITING.get(job.fault, ()):
        patch.setattr(module, "wait_flag", no_wait)
    if rank == 0 and job.fault in LATE:
        module, name = LATE[job.fault]
        late = getattr(module, name)
        patch.setattr(module, name, lambda *args: (time.sleep(FAULT_DELAY_S), late(*args))[1])
    if job.one_buffer:
        patch.setattr(symm_call, "NUM_BUFFERS", 1)
    try:
        yield
    finally:
        patch.undo()


class TestHeap:
    """A heap whose buffers start at any epoch, and that gives two buffers where one is asked for."""

    __test__ = False

    def __init__(self, heap, epoch: int):
        self.heap, self.epoch = heap, epoch
        self.rank, self.size, self.device, self.close = heap.rank, heap.size, heap.device, heap.close

    def allocate(self, shape, dtype, *, num_buffers):
        buffer = self.heap.allocate(shape, dtype, num_buffers=max(2, num_buffers))
        for words in (buffer.flags, buffer.epoch):
            words.fill_(self.epoch)
        for tensor in buffer.local:
            tensor.fill_(torch.nan)
        self.heap.barrier()
        return buffer


def make_overlap(group, job: Job, pause) -> SymmOverlap:
    """The backend with the job's delays and faults."""
    heap = TestHeap(open_heap(group, device=torch.device("cpu"), timeout_s=job.timeout_s), job.epoch)
    overlap = SymmOverlap(heap, ranks=group.ranks, timeout_s=job.timeout_s)
    overlap.push = SlowPush(heap.device, pause, flag_first=job.fault == "flag before data")

    def begin(peers, index):
        pause()
        signals.begin(peers, index)
        if job.fault == "DONE at once":
            signals.finish(peers)
        pause()

    def finish(peers):
        pause()
        signals.finish(peers)

    object.__setattr__(overlap.setting, "signals", SimpleNamespace(begin=begin, finish=finish))
    return overlap


def operands(job: Job, world: int, call: int) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """Every rank's x and weight, and the bias, the same on all ranks."""
    generator = torch.Generator().manual_seed(1000 * job.seed + call)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(job.dtype)

    rows = job.rows * (world if job.op in ("gemm_reduce", "dgrad_reduce") and job.sequence_parallel else 1)
    transposed = job.op in ("dgrad_reduce", "gather_dgrad")
    xs = [draw(rows, job.K) for _ in range(world)]
    weights = [draw(job.K, job.N) if transposed else draw(job.N, job.K) for _ in range(world)]
    return xs, weights, draw(job.N) if job.bias else None


def one_call(overlap: SymmOverlap, job: Job, tp: TensorParallel, call: int) -> tuple[tuple, tuple]:
    """(what the backend gives, what plain torch gives)."""
    xs, weights, bias = operands(job, tp.size, call)
    x, weight, factors = xs[tp.rank], weights[tp.rank], list(zip(xs, weights, strict=True))
    if job.op == "gather_gemm":
        expected = gather_reference.forward(xs, weight, bias, transposed=False)
        return overlap.gather_gemm(x, weight, bias, tp=tp, site="test"), expected
    if job.op == "gather_dgrad":
        expected = gather_reference.forward(xs, weight, None, transposed=True)
        return overlap.gather_dgrad(x, weight, tp=tp, site="test", meanwhile=lambda full: full), expected
    reference = scatter_reference if job.sequence_parallel else all_reduce_reference
    transposed = job.op == "dgrad_reduce"
    expected = reference.forward(factors, None if transposed else bias, transposed=transposed)
    expected = expected[tp.rank] if job.sequence_parallel else expected
    if transposed:
        return overlap.dgrad_reduce(x, weight, tp=tp, site="test", meanwhile=lambda: call), (expected, call)
    return (overlap.gemm_reduce(x, weight, bias, tp=tp, site="test"),), (expected,)


def run_job(rank: int, world: int, job: Job) -> dict:
    """The largest relative error of each call and all results, from calls with random pauses on every rank."""
    group = mesh_for(Sizes(tp=world)).tp
    chance = random.Random(100 * job.seed + rank)
    slow = job.fault and rank == 0
    pause = (lambda: time.sleep(chance.choice((0, 0, 0.02)))) if job.delays else lambda: None
    with planted(job, rank):
        overlap = make_overlap(group, job, pause)
        tp = TensorParallel(group, job.sequence_parallel)
        errors, results = [], []
        for call in range(job.num_calls):
            if slow:
                time.sleep(FAULT_DELAY_S)
            actual, expected = one_call(overlap, job, tp, call)
            results.append(actual)
            errors.append(max(relative(a, e) for a, e in zip(actual, expected, strict=True)))
        overlap.close()
    return {"errors": errors, "results": results, "sent": dict(group.ledger.by_axis())}


def relative(actual, expected) -> float:
    """Norm of the difference over the norm; infinite for NaN and other shapes."""
    if not isinstance(expected, Tensor):
        return 0.0 if actual == expected else float("inf")
    if actual.shape != expected.shape or actual.dtype != expected.dtype or not actual.isfinite().all():
        return float("inf")
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)).item()
