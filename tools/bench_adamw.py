"""CPU AdamW and gradient norm on one flat shard, one thread: megalite's C++ kernels against torch, side by side.

Every round times all contestants in turn, so that a busy machine hits them alike; a row gives the median over rounds of
the ratio within a round. Targets: the bare update at least 0.95x, scale + clip + bf16 copy at least 1.4x torch's speed.
Run it on an idle machine: python tools/bench_adamw.py [--elements N] [--rounds N]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite import native
from megalite.kernels.adamw import Hyper, Tensors, adamw_step, native_impl, reference
from megalite.kernels.grad_norm import native_impl as native_norm
from megalite.kernels.grad_norm import square_sum

ELEMENTS = 45_000_000
HYPER = Hyper(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=5)
CLIP = 0.97


@dataclass(frozen=True)
class Row:
    """One comparison: medians in seconds, and how many times faster than torch megalite is."""

    name: str
    ours_s: float
    torch_s: float
    ratio: float
    target: float

    @property
    def met(self) -> bool:
        """Whether the target is reached."""
        return self.ratio >= self.target

    def text(self) -> str:
        """One line."""
        verdict = "met" if self.met else "MISSED"
        return (
            f"{self.name:32} {self.ours_s * 1e3:8.1f} ms  torch {self.torch_s * 1e3:8.1f} ms  {self.ratio:5.2f}x  "
            f"target {self.target:.2f}x {verdict}"
        )


def rows(*, elements: int = ELEMENTS, rounds: int = 15) -> list[Row]:
    """Measure with one thread; torch's number of threads is put back afterwards.

    Raises:
        RuntimeError: the extension is not built.
    """
    if native.load() is None:
        raise RuntimeError(f"the C++ kernels are missing: {native.why_missing()}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [
            _compare(name, *pair, rounds=rounds, target=target) for name, pair, target in _contests(_make(elements))
        ]
    finally:
        torch.set_num_threads(threads)


def _make(elements: int) -> Tensors:
    """Random data with all pages touched."""
    generator = torch.Generator().manual_seed(0)
    main, grad, exp_avg = (torch.randn(elements, generator=generator) for _ in range(3))
    return Tensors(main, grad, exp_avg.mul_(1e-2), grad.square(), torch.zeros(elements, dtype=torch.bfloat16))


def _contests(full: Tensors) -> list[tuple[str, tuple[Callable, Callable], float]]:
    """(name, (ours, torch's), target)."""
    bare = Tensors(full.main, full.grad, full.exp_avg, full.exp_avg_sq)

    def torch_full() -> None:
        full.grad.mul_(CLIP)
        adamw_step([bare], HYPER, impl=reference)
        full.out_copy.copy_(full.main)

    return [
        (
            "adamw, bare",
            (
                lambda: adamw_step([bare], HYPER, impl=native_impl),
                lambda: adamw_step([bare], HYPER, impl=reference),
            ),
            0.95,
        ),
        (
            "adamw, scale + clip + bf16 copy",
            (lambda: adamw_step([full], HYPER, scale=CLIP, impl=native_impl), torch_full),
            1.4,
        ),
        # torch sums in fp32 here, which is its fast way
        (
            "gradient norm in fp64",
            (lambda: square_sum(full.grad, impl=native_norm), lambda: _torch_norm(full.grad)),
            0.95,
        ),
    ]


def _torch_norm(grad: Tensor) -> Tensor:
    """What one writes without a kernel."""
    return torch.linalg.vector_norm(grad).square()


def _compare(name: str, ours: Callable, theirs: Callable, *, rounds: int, target: float) -> Row:
    times: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        order = (ours, theirs) if number % 2 else (theirs, ours)
        taken = {run: _timed(run) for run in order}
        if number:  # the first round warms up
            times.append((taken[ours], taken[theirs]))
    mine, other = (statistics.median(column) for column in zip(*times, strict=True))
    return Row(name, mine, other, statistics.median(b / a for a, b in times), target)


def _timed(run: Callable) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=ELEMENTS)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    for row in rows(elements=arguments.elements, rounds=arguments.rounds):
        print(row.text())


if __name__ == "__main__":
    main()
