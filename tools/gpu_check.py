"""Everything that needs one GPU, as a few commands with time limits: writes report.json and report.md.

Stages: doctor; build (csrc into the checkout); check (every kernel against float64, bf16 first); symm (kernels of
several ranks, on one GPU); bench (with the ceilings measured in the same run); collectives (ours, between virtual ranks
on the GPU); train (a 1B model on one GPU: MFU and peak memory). A stage that fails does not stop the next.
`--device cpu --tiny` runs the same lines at toy sizes on a machine with no GPU, but for collectives.
"""

import argparse
import datetime
import json
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUDGET_S = 460
"""Of all stages together; under 8 minutes with the start of Python."""
WARM_UP = 5
"""Steps of the training that are not counted."""
LARGE = {
    "model": {
        "family": "llama", "num_layers": 16, "hidden_size": 2048, "num_heads": 16, "num_kv_heads": 8,
        "ffn_size": 8192, "vocab_size": 32000, "max_seq_len": 2048,
    },
    "batch": {"global_batch_size": 16, "micro_batch_size": 4},
    "precision": {"compute": "bf16"},
    "lr": {"peak": 3e-4, "warmup_steps": 5},
    "data": {"train": [{"path": "builtin:stdlib"}]},
    "checkpoint": {"resume": "none"},
}  # fmt: skip
"""About 1.1e9 parameters, 32768 tokens a step."""
TINY_MODEL = {
    "family": "llama", "num_layers": 2, "hidden_size": 32, "num_heads": 2, "ffn_size": 48, "vocab_size": 257,
    "max_seq_len": 32,
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """The command line."""

    device: str
    tiny: bool
    out: Path
    steps: int
    skip: tuple[str, ...]


@dataclass
class Stage:
    """The outcome of one stage; `numbers` are what the report shows of it."""

    name: str
    ok: bool
    wall_s: float
    output: str
    numbers: dict[str, Any] = field(default_factory=dict)


def command(*arguments: str) -> list[str]:
    """A command of megalite in this Python."""
    return [sys.executable, "-m", "megalite", *arguments]


def doctor(options: Options) -> list[str]:
    """What the machine is."""
    return command("doctor")


def build(options: Options) -> list[str]:
    """csrc, into the checkout; when tiny beside it, so that a test changes nothing."""
    where = ["--build-lib", str(options.out / "build")] if options.tiny else ["--inplace"]
    return [sys.executable, "setup.py", "-q", "build_ext", *where, "--build-temp", str(options.out / "build_temp")]


def check(options: Options) -> list[str]:
    """Every kernel in the dtypes of the device."""
    dtypes = ["fp32"] if options.tiny else ["bf16", "fp32", "fp16"]
    return command("kernels", "check", "--device", options.device, *(word for d in dtypes for word in ("--dtype", d)))


def bench(options: Options) -> list[str]:
    """All ops; torch.compile too, which takes most of the time."""
    sizes = ["--tiny", "--no-compile", "--rounds", "2"] if options.tiny else ["--rounds", "15"]
    return command("kernels", "bench", "--device", options.device, "--json", str(options.out / "bench.json"), *sizes)


def symm(options: Options) -> list[str]:
    """Kernels of overlap.backend=symm, several ranks on the one GPU."""
    return [
        sys.executable,
        str(ROOT / "tools" / "gpu_symm.py"),
        "--device",
        options.device,
        *["--tiny"][: options.tiny],
    ]


def collectives(options: Options) -> list[str]:
    """Our collectives between virtual ranks on the one GPU."""
    return [sys.executable, "tools/bench_symm.py", "--json", str(options.out / "collectives.json")]


def train(options: Options) -> list[str]:
    """The 1B model, or a toy."""
    config: dict[str, Any] = LARGE | {
        "run": {"dir": str(options.out / "run"), "steps": options.steps, "device": options.device, "eval_batches": 1}
    }
    if options.tiny:
        config |= {"model": TINY_MODEL, "precision": {"compute": "fp32"}}
        config["data"] = {"train": [{"path": "builtin:docs"}]}
    shutil.rmtree(options.out / "run", ignore_errors=True)
    path = options.out / "train.yaml"
    path.write_text(json.dumps(config, indent=1) + "\n")  # JSON is YAML
    return command("train", str(path))


STAGES: dict[str, tuple[Callable[[Options], list[str]], int]] = {
    "doctor": (doctor, 60),
    "build": (build, 120),
    "check": (check, 120),
    "symm": (symm, 90),
    "bench": (bench, 200),
    "collectives": (collectives, 60),
    "train": (train, 200),
}
"""Name -> its command and its own limit in seconds."""
ON_A_GPU = ("collectives",)
"""Stages that are left out with --device cpu."""


def bench_numbers(out: Path) -> dict[str, Any]:
    """Ceilings and rows of the bench's file."""
    return json.loads((out / "bench.json").read_text())


def collectives_numbers(out: Path) -> dict[str, Any]:
    """Time of a call, and its rate over that of a copy."""
    return {"rows": json.loads((out / "collectives.json").read_text())}


def train_numbers(out: Path) -> dict[str, Any]:
    """Medians over the steps after the warm-up."""
    lines = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    counted = steps[WARM_UP:] or steps

    def median(name: str) -> float | None:
        values = [line[name] for line in counted if line.get(name) is not None]
        return statistics.median(values) if values else None

    return {
        "steps": len(steps),
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
        "step_time_s": median("step_time_s"),
        "tokens_per_s": median("tokens_per_s"),
        "tflops": median("tflops_per_rank"),
        "mfu": median("mfu"),
        "peak_memory_gb": max(line["memory_gb"] for line in steps),
    }


NUMBERS = {"bench": bench_numbers, "collectives": collectives_numbers, "train": train_numbers}


def run_stage(name: str, options: Options, left_s: float) -> Stage:
    """Run one command under its limit and read what it wrote."""
    make, limit_s = STAGES[name]
    limit_s = min(limit_s, left_s)
    began = time.monotonic()
    try:
        done = subprocess.run(
            make(options), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit_s
        )
        ok, output = done.returncode == 0, done.stdout
    except subprocess.TimeoutExpired as error:
        text = error.stdout or ""
        ok, output = False, (text if isinstance(text, str) else text.decode()) + f"\nstopped after {limit_s:.0f} s"
    stage = Stage(name, ok, time.monotonic() - began, output)
    if ok and name in NUMBERS:
        try:
            stage.numbers = NUMBERS[name](options.out)
        except (OSError, KeyError, ValueError, IndexError) as error:
            stage.ok, stage.output = False, f"{output}\nits numbers can't be read: {type(error).__name__}: {error}"
    return stage


def card() -> str:
    """The GPU's name and driver, or the CPU."""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=30)
        if done.returncode == 0:
            return done.stdout.strip().splitlines()[0]
    return f"no GPU ({platform.machine()} CPU)"


def markdown(stages: list[Stage], record: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"# GPU check, {record['date']}", "", record["card"], "", "| stage | result | seconds |", "|---|---|---|"]
    lines += [f"| {stage.name} | {'ok' if stage.ok else 'FAILED'} | {stage.wall_s:.1f} |" for stage in stages]
    for stage in stages:
        if stage.name == "train" and stage.numbers:
            lines += ["", "## Training", "", *(f"- {name}: {_number(n)}" for name, n in stage.numbers.items())]
        elif stage.output.strip():
            lines += ["", f"## {stage.name.capitalize()}", "", "```", stage.output.strip()[-12000:], "```"]
    return "\n".join(lines) + "\n"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "not known" if value is None else str(value)


def main() -> int:
    """Run the stages and write the reports; 1 when a stage failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="toy sizes: a test of this file")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu_check")
    parser.add_argument("--steps", type=int, default=20, help="training steps")
    parser.add_argument("--skip", nargs="*", default=[], choices=list(STAGES), metavar="STAGE")
    given = parser.parse_args()
    options = Options(given.device, given.tiny, given.out.resolve(), given.steps, tuple(given.skip))
    options.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + BUDGET_S
    stages = []
    left_out = options.skip + (ON_A_GPU if options.device == "cpu" else ())
    for name in (name for name in STAGES if name not in left_out):
        stages.append(run_stage(name, options, max(1.0, ends - time.monotonic())))
        print(f"{name}: {'ok' if stages[-1].ok else 'FAILED'} in {stages[-1].wall_s:.1f} s", flush=True)
        if not stages[-1].ok:
            print("\n".join(f"    {line}" for line in stages[-1].output.splitlines()[-15:]), flush=True)
    record = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "card": card(),
        "tiny": options.tiny,
        "stages": [asdict(stage) for stage in stages],
    }
    (options.out / "report.json").write_text(json.dumps(record, indent=1) + "\n")
    (options.out / "report.md").write_text(markdown(stages, record))
    print(f"reports: {options.out}/report.json, report.md")
    return 0 if all(stage.ok for stage in stages) else 1


if __name__ == "__main__":
    sys.exit(main())
