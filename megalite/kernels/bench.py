"""Speed of every implementation of an op, next to torch eager, torch.compile and Liger-Kernel, on random data.

A number is a median over rounds in which all contestants take turns, so that a change of clocks or load meets them
alike. The roofline is what this device does in the same run: bytes of a large copy, FLOPs of a large GEMM; the floor of
an op is the larger of the two times that its case needs at least.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite.kernels import baselines
from megalite.kernels.adamw import Tensors, adamw_step
from megalite.kernels.baselines import EPS, Function
from megalite.kernels.cases import Case
from megalite.kernels.catalog import ALL_NAMES, OPTIMIZER_OPS
from megalite.kernels.check import load_cases
from megalite.kernels.cross_entropy import cross_entropy
from megalite.kernels.layernorm import layernorm_residual
from megalite.kernels.registry import available
from megalite.kernels.rmsnorm import rmsnorm_residual
from megalite.observe.log import get_logger

SMALL = {
    "rmsnorm": (4096, 1024),
    "layernorm": (4096, 1024),
    "attention": (1, 512, 8, 8, 32, 1, 0),
    "rope": (2, 1024, 12, 10, 64),
    "swiglu": (2048, 1408),
    "gelu": (2048, 2048),
    "cross_entropy": (1024, 4096, 4096),
    "linear_cross_entropy": (1024, 256, 4096, 4096),
    "wgrad": (1024, 512, 512),
    "dropout": (2048, 1024, 1),
    "adamw": (4_000_000,),
    "grad_norm": (4_000_000,),
}
"""Sizes for a CPU, where those of BENCH would take minutes."""


FOREIGN = ("torch.compile", "liger")
"""Contestants that are left out, with a warning, where they fail."""
SLEEP_CYCLES = 2_000_000
"""About a millisecond in which the GPU waits and Python enqueues, so that its overhead is not measured."""


@dataclass(frozen=True)
class Ceilings:
    """What the device reached just now: bytes per second (read and write) of a copy, FLOP/s of a GEMM."""

    copy_bytes_per_s: float
    gemm_flops_per_s: float

    def floor_s(self, num_bytes: int, flops: int) -> float:
        """The least time that these need."""
        return max(num_bytes / self.copy_bytes_per_s, flops / self.gemm_flops_per_s)


@dataclass(frozen=True)
class Row:
    """One contestant on one case. Times are medians; `of_roofline` is floor / time; `vs_torch` torch's time / ours."""

    op: str
    case: str
    dtype: str
    name: str
    forward_s: float
    total_s: float
    num_bytes: int
    flops: int
    of_roofline: float
    vs_torch: float

    def record(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self)


@dataclass(frozen=True)
class Settings:
    """How much is measured. `tiny`: the smallest sizes, for tests of the benchmark itself."""

    device: torch.device
    dtype: torch.dtype
    rounds: int = 15
    compile: bool = True
    tiny: bool = False


def medians(functions: dict[str, Callable[[], object]], device: torch.device, *, rounds: int) -> dict[str, float]:
    """Median seconds of each function; all take turns in every round, after one warm-up each."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(rounds):
        for name, function in functions.items():
            times[name].append(_timed(function, device))
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def _timed(function: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        function()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SLEEP_CYCLES)
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def ceilings(settings: Settings) -> Ceilings:
    """Measure a copy that does not fit the caches and a square GEMM."""
    cuda, tiny = settings.device.type == "cuda", settings.tiny
    source = torch.rand((1 << 30) if cuda else (1 << 16) if tiny else (1 << 26), device=settings.device).to(
        torch.float32
    )
    target = torch.empty_like(source)
    size = 8192 if cuda else 64 if tiny else 1024
    a, b = (torch.randn(size, size, device=settings.device).to(settings.dtype) for _ in range(2))
    functions = {"copy": lambda: target.copy_(source), "gemm": lambda: a @ b}
    found = medians(functions, settings.device, rounds=settings.rounds)
    moved = 2 * source.numel() * source.element_size()
    return Ceilings(moved / found["copy"], 2 * size**3 / found["gemm"])


def cases_of(op: str, settings: Settings) -> list[Case]:
    """BENCH on a GPU, one moderate case on a CPU; the largest of the small ones when tiny."""
    cases, dtype = load_cases(op), _dtype(op, settings)
    if settings.tiny:
        return [max((c for c in cases.CASES if c.dtype == dtype), key=lambda case: case.forward_bytes)]
    if settings.device.type == "cuda":
        return [case for case in cases.BENCH if case.dtype == dtype]
    return [cases.make_case(*SMALL[op], dtype=dtype)]


def _dtype(op: str, settings: Settings) -> torch.dtype:
    """The optimizer works on main params."""
    return torch.promote_types(settings.dtype, torch.float32) if op in OPTIMIZER_OPS else settings.dtype


def contestants(op: str, settings: Settings, *, with_compile: bool = True) -> dict[str, Function]:
    """Name -> function of a case's tensors; torch comes first."""
    found: dict[str, Function] = {}
    if op in baselines.TORCH:
        found["torch"] = baselines.TORCH[op]
        if settings.compile and with_compile:
            found["torch.compile"] = baselines.compiled(op)
    if settings.device.type == "cuda" and op in (others := baselines.liger()):
        found["liger"] = others[op]
    for name in ALL_NAMES:
        impl, _ = available(op, name, settings.device, _dtype(op, settings))
        if impl is not None:
            found[name] = _call(op, impl)
    return found


def _call(op: str, impl: Any) -> Function:
    """The op without what the case's own call adds: copies of logits that backward overwrites, joined results."""
    cases = load_cases(op)
    if op == "cross_entropy":
        return lambda logits, targets, valid: cross_entropy(logits, targets, num_valid=valid, impl=impl)
    if op == "rmsnorm":
        return lambda x, w, *other: (
            rmsnorm_residual(x, *other, weight=w, eps=EPS, impl=impl) if other else cases.call(x, w, impl=impl)
        )
    if op == "layernorm":
        return lambda x, w, b, *other: (
            layernorm_residual(x, *other, weight=w, bias=b, eps=EPS, impl=impl)
            if other
            else cases.call(x, w, b, impl=impl)
        )
    if op == "adamw":
        return _adamw(cases, impl)
    return partial(cases.call, impl=impl)


def _adamw(cases: Any, impl: Any) -> Function:
    """In place, with a bf16 copy that is allocated once."""
    copies: list[Tensor] = []

    def step(*tensors: Tensor) -> None:
        if not copies:
            copies.append(torch.empty_like(tensors[0], dtype=torch.bfloat16))
        adamw_step([Tensors(*(t.detach() for t in tensors), copies[0])], cases.HYPER, scale=cases.SCALE, impl=impl)

    return step


def bench_op(op: str, settings: Settings, limits: Ceilings) -> list[Row]:
    """All contestants on the op's cases; torch.compile, which compiles for each size, on the first only."""
    rows = []
    for i, case in enumerate(cases_of(op, settings)):
        rows += _bench_case(case, contestants(op, settings, with_compile=i == 0), settings, limits, op=op)
    return rows


def _bench_case(
    case: Case, functions: dict[str, Function], settings: Settings, limits: Ceilings, *, op: str
) -> list[Row]:
    tensors, rest = case.inputs(device=settings.device)
    functions = {
        name: f for name, f in functions.items() if name not in FOREIGN or _works(name, f, case, tensors, rest)
    }
    forward = medians(
        {name: partial(_forward, function, tensors, rest) for name, function in functions.items()},
        settings.device,
        rounds=settings.rounds,
    )
    total = forward
    if case.backward_bytes:
        total = medians(
            {name: _both(function, tensors, rest) for name, function in functions.items()},
            settings.device,
            rounds=settings.rounds,
        )
    num_bytes = case.forward_bytes + case.backward_bytes
    floor = limits.floor_s(num_bytes, case.flops)
    dtype = str(case.dtype).removeprefix("torch.")
    return [
        Row(
            op=op,
            case=case.name,
            dtype=dtype,
            name=name,
            forward_s=forward[name],
            total_s=total[name],
            num_bytes=num_bytes,
            flops=case.flops,
            of_roofline=floor / total[name],
            vs_torch=total.get("torch", total[name]) / total[name],
        )
        for name in functions
    ]


def _works(name: str, function: Function, case: Case, tensors: list[Tensor], rest: tuple[Any, ...]) -> bool:
    """Whether software that is not ours takes this case, e.g. torch.compile without a C++ compiler."""
    try:
        _forward(function, tensors, rest)
        if case.backward_bytes:
            _both(function, tensors, rest)()
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        get_logger().warning("%s leaves out %s: %s", name, case.name, reason)
        return False
    return True


def _forward(function: Function, tensors: list[Tensor], rest: tuple[Any, ...]) -> None:
    with torch.no_grad():
        function(*tensors, *rest)


def _both(function: Function, tensors: list[Tensor], rest: tuple[Any, ...]) -> Callable[[], None]:
    """Forward and backward with a normal upstream gradient, drawn once."""
    upstream: list[Tensor] = []

    def run() -> None:
        y = function(*tensors, *rest)
        outputs = y if isinstance(y, tuple) else (y,)
        if not upstream:
            upstream.extend(torch.randn_like(output) for output in outputs)
        torch.autograd.grad(outputs, tensors, upstream)

    return run


def table(rows: list[Row], limits: Ceilings) -> str:
    """For people."""
    lines = [
        f"measured ceilings: copy {limits.copy_bytes_per_s / 1e9:.3g} GB/s, GEMM "
        f"{limits.gemm_flops_per_s / 1e12:.3g} TFLOP/s",
        f"{'op':21} {'case':18} {'dtype':9} {'implementation':15} {'forward ms':>10} {'total ms':>10} "
        f"{'MB':>8} {'GFLOP':>8} {'roofline':>8} {'vs torch':>8}",
    ]
    for row in rows:
        lines.append(
            f"{row.op:21} {row.case:18} {row.dtype:9} {row.name:15} {row.forward_s * 1e3:10.3f} "
            f"{row.total_s * 1e3:10.3f} {row.num_bytes / 1e6:8.1f} {row.flops / 1e9:8.2f} "
            f"{row.of_roofline:8.0%} {row.vs_torch:7.2f}x"
        )
    return "\n".join(lines)
