"""overlap.backend=symm on one GPU: ranks of one process, a stream each, and its GEMM beside the library's.

Ranks share the processors, and their "peers" are in the same memory: this shows that the protocol runs on a GPU and
that results are right, with copies that come late too. It says nothing about NVLink. Before anything waits, every
kernel is loaded and every block of memory taken, by calls whose gates are open.
`--device cpu --tiny` runs the same lines in Triton's interpreter as far as one thread can: with open gates only.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

if "cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.comm.symmetric import virtual_heaps
from megalite.kernels.gather_gemm import reference as gather_reference
from megalite.kernels.gather_gemm import triton_impl as gather_triton
from megalite.kernels.gemm_scatter import reference as scatter_reference
from megalite.kernels.signals import Peers, spin_limit
from megalite.mesh import Group
from megalite.parallel.tp.overlap.symm import SymmOverlap
from megalite.parallel.tp.rows import TensorParallel

TIMEOUT_S = 20.0
OPEN = 1 << 20
"""A flag that no call of this file waits beyond."""
TOLERANCE = 5e-3
"""Relative norm: a rounding or two of bf16."""
OPS = (
    ("gather_gemm", True),
    ("gather_dgrad", True),
    ("gemm_reduce", True),
    ("dgrad_reduce", True),
    ("gemm_reduce", False),
)
"""Method of the backend, and whether with sequence parallel."""
LATE_CYCLES = 20_000_000


class Ranks:
    """`size` ranks of this process."""

    def __init__(self, size: int, device: torch.device, dtype: torch.dtype):
        self.size, self.device, self.dtype = size, device, dtype
        self.module = torch.get_device_module(device)
        ranks = tuple(range(size))
        self.overlaps = [
            SymmOverlap(heap, ranks=ranks, timeout_s=TIMEOUT_S, share=size)
            for heap in virtual_heaps(size, device=device)
        ]
        self.groups = [Group("tp", ranks=ranks, rank=rank) for rank in ranks]
        self.streams = [self.module.Stream() for _ in ranks]

    def operands(self, op: str, sp: bool, sizes: tuple[int, int, int], seed: int) -> tuple[list, list]:
        """Every rank's x and weight. Sizes: all rows, the wide dim of a layer and the narrow one, of which 1/size is a
        rank's."""
        rows, wide, narrow = sizes
        gathers, transposed = op.startswith("gather"), op in ("gather_dgrad", "dgrad_reduce")
        K, N = (wide, narrow // self.size) if gathers else (narrow // self.size, wide)
        rows = rows // self.size if gathers and sp else rows
        generator = torch.Generator(self.device).manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=self.device).mul_(shape[-1] ** -0.25).to(self.dtype)

        xs = [draw(rows, K) for _ in range(self.size)]
        return xs, [draw(K, N) if transposed else draw(N, K) for _ in range(self.size)]

    def call(self, op: str, sp: bool, xs: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
        """One call on every rank; enqueued rank by rank, without a wait of the host."""
        results = []
        self.module.synchronize()
        for rank, overlap in enumerate(self.overlaps):
            tp = TensorParallel(self.groups[rank], sp)
            with self.module.stream(self.streams[rank]):
                results.append(one(overlap, op, xs[rank], weights[rank], tp))
        self.module.synchronize()
        for overlap in self.overlaps:
            overlap.setting.failures.check()
        return results

    def set_flags(self, value: int) -> None:
        """Open all gates, or with 0 begin from the start with poisoned buffers."""
        for overlap in self.overlaps:
            for channel in overlap.channels.values():
                channel.buffer.flags.fill_(value)
                if value == 0:
                    for word in (channel.buffer.epoch, channel.peers.used):
                        word.zero_()
                    for tensor in channel.buffer.local:
                        tensor.fill_(torch.nan)
        self.module.synchronize()


def one(overlap: SymmOverlap, op: str, x: Tensor, weight: Tensor, tp: TensorParallel) -> Tensor:
    """One rank's result."""
    if op == "gather_gemm":
        return overlap.gather_gemm(x, weight, None, tp=tp, site=op)[0]
    if op == "gemm_reduce":
        return overlap.gemm_reduce(x, weight, None, tp=tp, site=op)
    if op == "gather_dgrad":
        return overlap.gather_dgrad(x, weight, tp=tp, site=op, meanwhile=lambda full: None)[0]
    return overlap.dgrad_reduce(x, weight, tp=tp, site=op, meanwhile=lambda: None)[0]


def expected(op: str, sp: bool, xs: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """Every rank's result by plain torch."""
    if op.startswith("gather"):
        return [gather_reference.forward(xs, w, None, transposed=op == "gather_dgrad")[0] for w in weights]
    total = scatter_reference.summed(list(zip(xs, weights, strict=True)), None, transposed=op == "dgrad_reduce")
    return list(total.chunk(len(xs))) if sp else [total] * len(xs)


def open_gates(ranks: Ranks) -> None:
    """Heaps whose flags let everything pass from the start, so that first launches load modules while nothing waits."""
    for overlap in ranks.overlaps:
        allocate = overlap.heap.allocate

        def opened(shape, dtype, *, num_buffers, allocate=allocate):
            buffer = allocate(shape, dtype, num_buffers=num_buffers)
            buffer.flags.fill_(OPEN)
            return buffer

        overlap.heap.allocate = opened


def check_ranks(size: int, sizes: tuple[int, int, int], device: torch.device, *, calls: int) -> list[str]:
    """What is wrong with `calls` calls of every op on `size` ranks."""
    ranks = Ranks(size, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    open_gates(ranks)
    problems = []
    for op, sp in OPS:
        for seed in range(3):
            ranks.set_flags(OPEN)  # calls have set them back
            ranks.call(op, sp, *ranks.operands(op, sp, sizes, seed))
        if device.type == "cpu":
            continue
        ranks.set_flags(0)
        for seed in range(calls):
            xs, weights = ranks.operands(op, sp, sizes, seed)
            if seed % 2:
                with ranks.module.stream(ranks.overlaps[seed % size].push.stream):
                    torch.cuda._sleep(LATE_CYCLES)
            actual = ranks.call(op, sp, xs, weights)
            wanted = expected(op, sp, xs, weights)
            worst = max(((a.float() - e.float()).norm() / e.float().norm()).item() for a, e in zip(actual, wanted))  # noqa: B905
            same = sp or all(torch.equal(a, actual[0]) for a in actual)
            if not worst <= TOLERANCE or not same:
                problems.append(f"{op}, {size} ranks, call {seed}: error {worst:.2e}, same bits on all ranks: {same}")
    return problems


def lone(device: torch.device) -> Peers:
    """A single rank, which waits for nobody."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    flags = zeros(1, 64)
    pointers = torch.tensor([flags.data_ptr()], device=device)
    return Peers(0, 1, flags, pointers, zeros(1), zeros(2), zeros(6), zeros(2), spin_limit(TIMEOUT_S, device))


def median_ms(function: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Of one call, each waited for."""
    module, times = torch.get_device_module(device), []
    for _ in range(rounds + 2):
        module.synchronize()
        began = time.perf_counter()
        function()
        module.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[2:])


def product_line(sizes: tuple[int, int, int], device: torch.device, rounds: int) -> str:
    """The GEMM alone beside the library's, of the same numbers."""
    rows, N, K = sizes
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x, weight = (torch.randn(n, K, device=device).mul_(K**-0.25).to(dtype) for n in (rows, N))
    peers = lone(device)
    y = gather_triton.forward(x, x, weight, None, peers=peers)
    assert ((y - F.linear(x, weight)).float().norm() / y.float().norm()).item() < TOLERANCE
    ours = median_ms(lambda: gather_triton.forward(x, x, weight, None, peers=peers), device, rounds)
    theirs = median_ms(lambda: F.linear(x, weight), device, rounds)
    tflops = 2e-9 * rows * N * K / ours
    return f"GEMM {rows}x{N}x{K}: {ours:.3f} ms ({tflops:.1f} TFLOP/s), library {theirs:.3f} ms, {theirs / ours:.2f}x"


def main() -> int:
    """Run all, print what was found; 1 when something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="toy sizes: a test of this file")
    options = parser.parse_args()
    device = torch.device(options.device)
    sizes = (24, 20, 16) if options.tiny else (4096, 4096, 8192)
    problems = []
    for size in (2,) if options.tiny else (2, 4):
        found = check_ranks(size, sizes, device, calls=6)
        fine = "ok" if device.type == "cuda" else "ran, nothing compared"
        print(f"{size} ranks, {len(OPS)} ops: {'FAILED' if found else fine}", flush=True)
        problems += found
    for shape in [(20, 36, 24)] if options.tiny else [(8192, 3584, 8192), (8192, 7168, 8192), (8192, 4096, 1792)]:
        print(product_line(shape, device, rounds=1 if options.tiny else 20), flush=True)
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
