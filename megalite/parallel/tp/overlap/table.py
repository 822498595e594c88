"""The recorded rates that `overlap.backend: auto` decides by, and what they predict for one linear.

Invariant: pure arithmetic on global sizes, so all ranks of a job get the same answer; nothing is timed in a run.
Times are of one pass: the collective and its GEMM, and in backward the weight gradient, which a backend may run under
the collective too. W ranks, every rank's share of the rows in C pieces.
"""

from dataclasses import dataclass
from math import ceil, prod
from typing import Literal

Way = Literal["gather_gemm", "gemm_reduce", "dgrad_reduce", "gather_dgrad"]
"""The function of an overlap backend."""
CHUNKS = (1, 2, 4, 8)
"""Numbers of pieces to choose from."""
MIN_GAIN = 1.1
"""auto decomposes when that makes a pass faster by at least this factor: predictions are not that exact."""


@dataclass(frozen=True)
class Rates:
    """What one rank computes and sends, and where the numbers come from."""

    flops: dict[int, float]
    """GEMM operations per second, by bytes of an element."""
    tile: tuple[int, int]
    """Rows and columns of a GEMM's result that one unit computes at once."""
    units: int
    """Units that compute at once: a GEMM of few tiles leaves the others idle."""
    gemm_s: float
    """Added by each GEMM."""
    wire: float
    """Bytes per second that a rank sends."""
    latency_s: float
    """Added by each collective."""
    message_s: float
    """Added by each message of a collective."""
    source: str
    """For the log."""


RATES: dict[str, Rates] = {
    "gloo": Rates(
        flops={2: 4e11, 4: 1.2e11, 8: 6e10},  # measured: one thread of an AVX-512 server core, its neighbour busy
        tile=(8, 32),
        units=1,
        gemm_s=1e-5,
        wire=1.1e9,  # measured between processes of one host; 10 Gbit/s is about the same, slower links gain more
        latency_s=3e-4,  # measured: a small gather of two busy ranks
        message_s=3e-5,
        source="rates measured on a CPU over gloo",
    ),
    "nccl": Rates(
        flops={2: 7e14, 4: 5e13, 8: 5e13},  # H100: bf16, and fp32 without TF32
        tile=(128, 256),
        units=132,
        gemm_s=4e-6,
        wire=3.7e11,  # NVLink 4 one way, as NCCL reaches it
        latency_s=1e-5,
        message_s=1e-5,
        source="a model of H100 and NVLink, not measured",
    ),
}
"""Of the ranks of a transport: CPUs over gloo, GPUs over NCCL."""


@dataclass(frozen=True)
class LinearSize:
    """One pass of a linear on one of `tp` ranks: gathered or reduced rows are (rows, row_size), the GEMM makes
    2 * rows * row_size * local_size operations."""

    way: Way
    rows: int
    row_size: int
    local_size: int
    element_bytes: int
    tp: int
    sequence_parallel: bool


@dataclass(frozen=True)
class Prediction:
    """The best number of pieces, and seconds with it and with whole collectives."""

    chunks: int
    chunked_s: float
    none_s: float

    @property
    def pays(self) -> bool:
        """Whether pieces are worth it."""
        return self.none_s >= MIN_GAIN * self.chunked_s


def predict(size: LinearSize, rates: Rates, *, chunks: int | None = None) -> Prediction:
    """What a pass takes, with `chunks` pieces or the best number of them."""
    share = max(1, size.rows // size.tp)
    options = [c for c in CHUNKS if c <= share] if chunks is None else [chunks]
    times = {c: _chunked_s(size, rates, c) for c in options}
    best = min(times, key=lambda c: (times[c], c))
    return Prediction(best, times[best], _none_s(size, rates))


def _gemm_s(size: LinearSize, rates: Rates, rows: int) -> float:
    """Of that many rows, in whole tiles and whole waves of them."""
    gathers = size.way in ("gather_gemm", "gather_dgrad")
    columns, depth = (size.local_size, size.row_size)[:: 1 if gathers else -1]
    waves = ceil(ceil(rows / rates.tile[0]) * ceil(columns / rates.tile[1]) / rates.units)
    return waves * rates.units * 2 * prod(rates.tile) * depth / rates.flops[size.element_bytes] + rates.gemm_s


def _weights_s(size: LinearSize, rates: Rates) -> float:
    return 2 * size.rows * size.row_size * size.local_size / rates.flops[size.element_bytes] + rates.gemm_s


def _wire_s(size: LinearSize, rates: Rates) -> float:
    """Of the whole collective, without the cost per message."""
    num_bytes = size.rows * size.row_size * size.element_bytes * (size.tp - 1) / size.tp
    return (1 if size.sequence_parallel else 2) * num_bytes / rates.wire


def _none_s(size: LinearSize, rates: Rates) -> float:
    """The collective, then the GEMM; a column's weight gradient runs under the collective."""
    gemm, weights = _gemm_s(size, rates, size.rows), _weights_s(size, rates)
    wire = _wire_s(size, rates) + rates.latency_s
    if size.way == "dgrad_reduce":
        return gemm + max(wire, weights)
    return wire + gemm + (weights if size.way == "gather_dgrad" else 0.0)


def _chunked_s(size: LinearSize, rates: Rates, chunks: int) -> float:
    """The chain of pieces: each needs the one before it, on the wire and in the GEMM."""
    share = ceil(size.rows / size.tp)
    num = (size.tp - 1 if size.sequence_parallel else size.tp) * chunks
    gemm, wire = _gemm_s(size, rates, ceil(share / chunks)), _wire_s(size, rates) / num + rates.message_s
    own, weights = _gemm_s(size, rates, share), _weights_s(size, rates)
    if size.way in ("gather_gemm", "gather_dgrad"):
        first = own + (weights / size.tp if size.way == "gather_dgrad" else 0.0)
        after = weights - weights / size.tp if size.way == "gather_dgrad" else 0.0
        last = rates.latency_s + num * wire + gemm
        return max(first + num * gemm, rates.latency_s + wire + num * gemm, last) + after
    after = (own if size.sequence_parallel else 0.0) + (weights if size.way == "dgrad_reduce" else 0.0)
    sent = rates.latency_s + wire
    return max(num * gemm + after, gemm + (num - 1) * wire + sent, num * gemm + sent)
