"""`megalite kernels list|check|bench`: what each op runs on here, whether it is right, how fast it is."""

import json
from pathlib import Path

import torch

from megalite.config.schema import Kernels
from megalite.kernels import bench
from megalite.kernels.cases import WORDS
from megalite.kernels.catalog import ALL_NAMES, ALL_OPS, OPTIMIZER_OPS, taken
from megalite.kernels.check import check_op
from megalite.kernels.registry import available, load, select
from megalite.observe.outputs import check_output_file

DTYPES = {word: dtype for dtype, word in WORDS.items()}


def pick_device(device: str) -> torch.device:
    """auto, cpu or cuda.

    Raises:
        ValueError: cuda where torch sees no GPU.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device={device} must be auto, cpu or cuda; use auto")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device=cuda, but torch sees no GPU here; use cpu or auto (`megalite doctor` says why)")
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)


def pick_ops(ops: list[str]) -> list[str]:
    """The named ops, or all that exist.

    Raises:
        ValueError: an unknown op.
    """
    unknown = [op for op in ops if op not in ALL_OPS]
    if unknown:
        raise ValueError(f"{', '.join(unknown)} is no op; use {', '.join(ALL_OPS)}")
    return ops or list(ALL_OPS)


def list_kernels(*, device: str, dtype: str) -> str:
    """A table: op, its implementations, what `auto` takes; reasons below as notes."""
    where, compute = pick_device(device), _dtype(dtype)
    main = torch.promote_types(compute, torch.float32)
    chosen = select(Kernels(), where, compute)
    notes: dict[str, int] = {}
    lines = [f"{where.type}, compute {dtype}", ""]
    lines.append(f"{'op':21} {'auto takes':11} " + " ".join(f"{name:10}" for name in ALL_NAMES))
    for op in ALL_OPS:
        cells = [_cell(op, name, where, main if op in OPTIMIZER_OPS else compute, notes) for name in ALL_NAMES]
        lines.append(f"{op:21} {taken(op, chosen, where, main):11} " + " ".join(f"{cell:10}" for cell in cells))
    lines += ["", "ready: can be chosen here; -: there is none; no: see the note."]
    lines += [f"({number}) {reason}" for reason, number in notes.items()]
    lines += [
        "",
        "A config chooses with kernels.<op>, and with optimizer.implementation for adamw and grad_norm. Auto takes:",
    ]
    lines += [f"  {line}" for line in chosen.table().splitlines()]
    return "\n".join(line.rstrip() for line in lines)


def _cell(op: str, name: str, device: torch.device, dtype: torch.dtype, notes: dict[str, int]) -> str:
    module, reason = available(op, name, device, dtype)
    if module is not None:
        return "ready"
    return "-" if reason.endswith(" implementation") else f"no ({notes.setdefault(reason, len(notes) + 1)})"


def check_kernels(ops: list[str], *, device: str, dtypes: list[str]) -> int:
    """Run every implementation that this device has against float64; prints a line each, 1 when one is wrong."""
    where, failed, done = pick_device(device), 0, 0
    for op in pick_ops(ops):
        for name in ALL_NAMES:
            for dtype in dtypes:
                impl, _ = available(op, name, where, _dtype(dtype))
                result = impl and check_op(op, impl, device=where, dtype=_dtype(dtype))
                if not result or not result.num_cases:
                    continue
                done += 1
                failed += bool(result.failures)
                state = "FAIL" if result.failures else "ok  "
                print(
                    f"{state} {op:21} {name:10} {dtype:5} {result.num_cases:3} cases, worst {result.worst:.0%} of limit"
                )
                for text in result.failures:
                    print(f"     {text}")
    skipped = [name for name in ALL_NAMES if all(load(op, name)[0] is None for op in ALL_OPS)]
    print(
        f"{done} checks on {where.type}, {failed} failed"
        + (f"; no {', '.join(skipped)} kernels here" if skipped else "")
    )
    return 1 if failed else 0


def bench_kernels(
    ops: list[str], *, device: str, dtype: str | None, rounds: int, compiled: bool, tiny: bool, path: str | None
) -> str:
    """Measure, and write the rows to a JSON file when `path` is given; returns the table."""
    if path:
        check_output_file("--json", path)
    where = pick_device(device)
    compute = _dtype(dtype or ("bf16" if where.type == "cuda" else "fp32"))
    settings = bench.Settings(where, compute, rounds=rounds, compile=compiled, tiny=tiny)
    limits = bench.ceilings(settings)
    rows = [row for op in pick_ops(ops) for row in bench.bench_op(op, settings, limits)]
    if path:
        record = {"device": settings.device.type, "ceilings": vars(limits), "rows": [row.record() for row in rows]}
        Path(path).write_text(json.dumps(record, indent=1) + "\n")
    return bench.table(rows, limits)


def _dtype(word: str) -> torch.dtype:
    if word not in DTYPES:
        raise ValueError(f"--dtype={word} must be one of {', '.join(DTYPES)}")
    return DTYPES[word]
