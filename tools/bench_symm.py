"""The symmetric collectives between virtual ranks on one GPU: results to the bit, and time against a copy.

Each of W ranks has its own stream, buffers and flags in the memory of the one GPU, so kernels, flags and waits are the
real ones, but no NVLink is measured. `of copy` is the rate at which a collective reads and writes memory, all ranks
together, over that of a plain copy measured in the same run. Numbers with few bytes show latency, not rate.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from megalite.comm.symm_channel import SymmChannel  # noqa: E402
from megalite.comm.symmetric import virtual_heaps  # noqa: E402

OPS = ("one_shot", "two_shot", "all_gather", "reduce_scatter", "broadcast")
MOVED = {
    "one_shot": lambda w: 2 * w + 1,
    "two_shot": lambda w: (6 * w - 4) / w,
    "all_gather": lambda w: (3 * w - 1) / w,
    "reduce_scatter": lambda w: (3 * w - 1) / w,
    "broadcast": lambda w: (3 * w - 2) / w,
}
"""Times the larger of a call's two tensors: what one rank reads and writes, on average."""
TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Row:
    """One op at one size: median over `rounds` of the time of a call, all ranks at once."""

    op: str
    ranks: int
    dtype: str
    num_bytes: int
    time_us: float
    of_copy: float | None


class Ranks:
    """W virtual ranks of one device, each with its stream (a thread where there are none)."""

    def __init__(self, size: int, device: torch.device, *, buffer_bytes: int, kernels: Any = None):
        self.size, self.device = size, device
        self.module = torch.get_device_module(device)
        self.channels = [
            SymmChannel(heap, ranks=tuple(range(size)), timeout_s=TIMEOUT_S, buffer_bytes=buffer_bytes, kernels=kernels)
            for heap in virtual_heaps(size, device=device)
        ]
        self.streams = [self.module.Stream() for _ in range(size)]
        self.module.synchronize()  # buffers are zero before any stream writes them

    def run(self, call: Callable[[int, SymmChannel], None], times: int = 1) -> None:
        """`call(rank, channel)` on every rank, several times; all ranks' calls are enqueued before any wait."""
        if self.device.type == "cpu":
            with ThreadPoolExecutor(self.size) as pool:
                list(pool.map(lambda rank: [call(rank, self.channels[rank]) for _ in range(times)], range(self.size)))
            return
        for _ in range(times):
            for rank, channel in enumerate(self.channels):
                with self.module.stream(self.streams[rank]):
                    call(rank, channel)

    def wait(self) -> None:
        """Until all is done; raises where a wait ran into its limit."""
        for channel in self.channels:
            channel.synchronize()
        self.module.synchronize()


def make_call(op: str, inputs: Tensor, outputs: Tensor) -> Callable[[int, SymmChannel], None]:
    """One rank's call; rows of `inputs` and `outputs` are the ranks'. An all-reduce and a broadcast work on outputs."""

    def call(rank: int, channel: SymmChannel) -> None:
        if op == "all_gather":
            channel.all_gather(outputs[rank], inputs[rank])
        elif op == "reduce_scatter":
            channel.reduce_scatter(outputs[rank], inputs[rank])
        elif op == "broadcast":
            channel.broadcast(outputs[rank], 0)
        else:
            channel.all_reduce(outputs[rank], kind=op)

    return call


def tensors(op: str, size: int, num: int, *, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random inputs and outputs of all ranks; `num` elements are the larger of a rank's two tensors."""
    generator = torch.Generator(device).manual_seed(num)
    wide = num // size if op == "all_gather" else num
    inputs = torch.randn(size, wide, generator=generator, device=device).to(dtype)
    if op in ("one_shot", "two_shot", "broadcast"):
        return inputs, inputs.clone()
    return inputs, inputs.new_full((size, num if op == "all_gather" else num // size), torch.nan)


def expected(op: str, inputs: Tensor) -> Tensor:
    """What the outputs must be, to the bit."""
    size = len(inputs)
    if op == "all_gather":
        return inputs.reshape(1, -1).expand(size, -1)
    if op == "broadcast":
        return inputs[:1].expand(size, -1)
    total = inputs[0].float()
    for row in inputs[1:]:
        total = total + row.float()
    total = total.to(inputs.dtype)
    return total.view(size, -1) if op == "reduce_scatter" else total.expand(size, -1)


def check(ranks: Ranks, op: str, num: int, dtype: torch.dtype) -> None:
    """Compare every bit of every rank's result.

    Raises:
        AssertionError: they differ.
    """
    inputs, outputs = tensors(
        op, ranks.size, num // (8 * ranks.size) * 8 * ranks.size, dtype=dtype, device=ranks.device
    )
    ranks.module.synchronize()
    ranks.run(make_call(op, inputs, outputs))
    ranks.wait()
    right = expected(op, inputs)
    wrong = (outputs.view(torch.uint8) != right.contiguous().view(torch.uint8)).sum().item()
    assert not wrong, f"{op}, {ranks.size} ranks, {dtype}, {num} elements: {wrong} bytes differ"


def time_us(ranks: Ranks, op: str, num: int, dtype: torch.dtype, *, rounds: int, calls: int = 10) -> float:
    """Median over rounds of the time per call, from the first stream's start to the last one's end."""
    inputs, outputs = tensors(op, ranks.size, num, dtype=dtype, device=ranks.device)
    if op in ("one_shot", "two_shot"):
        outputs.zero_()  # sums of sums stay finite
    call = make_call(op, inputs, outputs)
    return statistics.median(_round_us(ranks, lambda: ranks.run(call, calls)) / calls for _ in range(rounds + 1))


def copy_rate(ranks: Ranks, num_bytes: int, *, rounds: int) -> float:
    """Bytes read and written per us by a plain copy of the same size."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=ranks.device)
    target = torch.empty_like(source)
    times = [_round_us(ranks, lambda: [target.copy_(source) for _ in range(10)]) / 10 for _ in range(rounds + 1)]
    return 2 * num_bytes / statistics.median(times)


def _round_us(ranks: Ranks, work: Callable[[], Any]) -> float:
    module = ranks.module
    if ranks.device.type == "cpu":
        began = time.perf_counter()
        work()
        return (time.perf_counter() - began) * 1e6
    begin, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
    module.synchronize()
    begin.record()
    for stream in ranks.streams:
        stream.wait_event(begin)
    work()
    for stream in ranks.streams:
        module.current_stream().wait_stream(stream)
    end.record()
    ranks.wait()
    return begin.elapsed_time(end) * 1e3


def measure(ranks: Ranks, sizes: Sequence[int], *, rounds: int) -> list[Row]:
    """All ops in bf16 at these numbers of bytes."""
    rate = copy_rate(ranks, max(sizes), rounds=rounds)
    rows = []
    for num_bytes in sizes:
        for op in OPS:
            took = time_us(ranks, op, num_bytes // 2, torch.bfloat16, rounds=rounds)
            moved = MOVED[op](ranks.size) * ranks.size * num_bytes
            rows.append(Row(op, ranks.size, "bf16", num_bytes, took, moved / took / rate))
    return rows


def table(rows: Sequence[Row]) -> str:
    """For people."""
    lines = [f"{'op':15} ranks  {'bytes':>10}  {'us':>9}  of copy"]
    lines += [f"{r.op:15} {r.ranks:5}  {r.num_bytes:10}  {r.time_us:9.1f}  {r.of_copy:7.0%}" for r in rows]
    return "\n".join(lines)


def run(device: torch.device, *, tiny: bool, rounds: int, kernels: Any = None) -> list[Row]:
    """Check, then measure, with 2 and 4 ranks."""
    rows = []
    for size in (2, 4):
        ranks = Ranks(size, device, buffer_bytes=4096 if tiny else 16 << 20, kernels=kernels)
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            for op in OPS:
                for num in (64, 4096) if tiny else (64, 200_000, 20_000_000):
                    check(ranks, op, num, dtype)
        print(f"{size} ranks: {', '.join(OPS)} in bf16, fp32 and fp16 are right to the bit", flush=True)
        rows += measure(ranks, [4096] if tiny else [1 << 16, 1 << 20, 1 << 24, 1 << 27], rounds=rounds)
    return rows


def main() -> int:
    """Print the table; 1 when a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the rows here too")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("this needs a GPU; tests/unit/test_bench_symm.py runs its lines with the host build", file=sys.stderr)
        return 2
    try:
        rows = run(torch.device("cuda"), tiny=False, rounds=given.rounds)
    except (AssertionError, RuntimeError) as error:
        print(f"FAIL {error}", file=sys.stderr)
        return 1
    print(table(rows))
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
