"""CPU AdamW and gradient norm on one flat shard, one thread: megalite's C++ kernels against torch, side by side.

Every round times all contestants in turn, so that a busy machine hits them alike; a row gives the median over rounds of
the ratio within a round. Targets: the bare update at least 0.95x, scale + clip + bf16 copy at least 1.4x torch's speed.
Run it on an idle machine: python tools/bench_adamw.py [--elements N] [--rounds N] [--deepspeed]
`--deepspeed` adds DeepSpeed's CPUAdam, which compiles itself at its first start: it needs deepspeed, ninja and a C++
compiler, and OMP_NUM_THREADS=1 for one thread.
"""

import argparse
import importlib
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
BARE, FULL = "adamw, bare", "adamw, scale + clip + bf16 copy"


@dataclass(frozen=True)
class Row:
    """One comparison: medians in seconds, and how many times faster than torch, and than DeepSpeed, megalite is."""

    name: str
    ours_s: float
    torch_s: float
    ratio: float
    target: float
    deepspeed_s: float | None = None
    deepspeed_ratio: float | None = None

    @property
    def met(self) -> bool:
        """Whether the target is reached."""
        return self.ratio >= self.target

    def text(self) -> str:
        """One line."""
        verdict = "met" if self.met else "MISSED"
        text = (
            f"{self.name:32} {self.ours_s * 1e3:8.1f} ms  torch {self.torch_s * 1e3:8.1f} ms  {self.ratio:5.2f}x  "
            f"target {self.target:.2f}x {verdict}"
        )
        if self.deepspeed_s is not None:
            text += f"  DeepSpeed {self.deepspeed_s * 1e3:8.1f} ms  {self.deepspeed_ratio:5.2f}x"
        return text


def rows(*, elements: int = ELEMENTS, rounds: int = 15, deepspeed: bool = False) -> list[Row]:
    """Measure with one thread; torch's number of threads is put back afterwards.

    Raises:
        RuntimeError: the extension is not built, or DeepSpeed is wanted and its kernel can't be compiled.
        ImportError: DeepSpeed is wanted and not installed.
    """
    if native.load() is None:
        raise RuntimeError(f"the C++ kernels are missing: {native.why_missing()}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        full = _make(elements)
        contests = _contests(full)
        if deepspeed:
            for name, step in _deepspeed(full).items():
                contests[name].runs["deepspeed"] = step
        return [_compare(name, contest, rounds=rounds) for name, contest in contests.items()]
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Contest:
    """Contestants (ours, torch, deepspeed) and the speed that ours should have, as a multiple of torch's."""

    target: float
    runs: dict[str, Callable[[], object]]


def _make(elements: int) -> Tensors:
    """Random data with all pages touched."""
    generator = torch.Generator().manual_seed(0)
    main, grad, exp_avg = (torch.randn(elements, generator=generator) for _ in range(3))
    return Tensors(main, grad, exp_avg.mul_(1e-2), grad.square(), torch.zeros(elements, dtype=torch.bfloat16))


def _contests(full: Tensors) -> dict[str, Contest]:
    """What is compared, by name."""
    bare = Tensors(full.main, full.grad, full.exp_avg, full.exp_avg_sq)

    def torch_full() -> None:
        full.grad.mul_(CLIP)
        adamw_step([bare], HYPER, impl=reference)
        full.out_copy.copy_(full.main)

    return {
        BARE: Contest(
            0.95,
            {
                "ours": lambda: adamw_step([bare], HYPER, impl=native_impl),
                "torch": lambda: adamw_step([bare], HYPER, impl=reference),
            },
        ),
        FULL: Contest(
            1.4,
            {"ours": lambda: adamw_step([full], HYPER, scale=CLIP, impl=native_impl), "torch": torch_full},
        ),
        # torch sums in fp32 here, which is its fast way
        "gradient norm in fp64": Contest(
            0.95,
            {"ours": lambda: square_sum(full.grad, impl=native_norm), "torch": lambda: _torch_norm(full.grad)},
        ),
    }


def _deepspeed(full: Tensors) -> dict[str, Callable[[], object]]:
    """DeepSpeed's CPUAdam on tensors of its own: the bare update, and with what ZeRO-Offload does around it."""
    adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    param = torch.nn.Parameter(full.main.clone())
    param.grad = full.grad.clone()
    betas = (HYPER.beta1, HYPER.beta2)
    optimizer = adam([param], lr=HYPER.lr, betas=betas, eps=HYPER.eps, weight_decay=HYPER.weight_decay)
    copy = torch.zeros_like(full.out_copy)

    def whole() -> None:
        param.grad.mul_(CLIP)
        optimizer.step()
        copy.copy_(param.detach())

    return {BARE: optimizer.step, FULL: whole}


def _torch_norm(grad: Tensor) -> Tensor:
    """What one writes without a kernel."""
    return torch.linalg.vector_norm(grad).square()


def _compare(name: str, contest: Contest, *, rounds: int) -> Row:
    times: list[dict[str, float]] = []
    for number in range(rounds + 1):
        names = list(contest.runs)
        first = number % len(names)
        taken = {which: _timed(contest.runs[which]) for which in names[first:] + names[:first]}
        if number:  # the first round warms up
            times.append(taken)
    middle = {which: statistics.median(taken[which] for taken in times) for which in contest.runs}
    ratio = {which: statistics.median(taken[which] / taken["ours"] for taken in times) for which in contest.runs}
    others = middle.get("deepspeed"), ratio.get("deepspeed")
    return Row(name, middle["ours"], middle["torch"], ratio["torch"], contest.target, *others)


def _timed(run: Callable) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=ELEMENTS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--deepspeed", action="store_true", help="also DeepSpeed's CPUAdam")
    arguments = parser.parse_args()
    for row in rows(**vars(arguments)):
        print(row.text())


if __name__ == "__main__":
    main()
