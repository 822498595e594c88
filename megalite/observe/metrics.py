"""metrics.jsonl: one JSON object per step, and one per evaluation. Written by rank 0 only.

A resumed run appends after the step it resumed from; lines of later steps, and a last line cut off by a death, go.
Values that are not finite are written as null, since JSON has no NaN. With TensorBoard the numbers are also events.
"""

import json
import os
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any

STEP_KEYS = (
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "samples",
    "skipped",
    "step_time_s",
    "tokens_per_s",
    "tflops_per_rank",
    "mfu",
    "hfu",
    "memory_gb",
    "comm_bytes",
)
"""Keys of a training line: tokens and samples are totals since step 0, skipped is whether this update was skipped,
mfu and hfu are fractions or null on hardware of unknown peak, memory_gb is the peak in GiB, comm_bytes {axis: bytes}
sent by this rank in this step."""


def require_tensorboard() -> None:
    """Raise ValueError when run.tensorboard=true can't be met; call it before anything is built."""
    if find_spec("tensorboard") is None:
        raise ValueError("run.tensorboard=true needs the package tensorboard; install it, or set run.tensorboard=false")


class MetricsWriter:
    """Appends lines to a metrics file; use it in a `with` or call `close`."""

    def __init__(self, path: Path | str, *, after_step: int = 0, tensorboard_dir: Path | str | None = None) -> None:
        """Open `path`, keeping only the lines of steps up to `after_step` (0: a new run)."""
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _truncate_after(self.path, after_step)
        self._file = self.path.open("a", encoding="utf-8")  # closed by close()
        self._events = None if tensorboard_dir is None else _event_writer(tensorboard_dir, after_step)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def write_step(self, record: dict[str, Any]) -> None:
        """Write a training line; its keys are exactly STEP_KEYS."""
        wrong = sorted(record.keys() ^ set(STEP_KEYS))
        assert not wrong, f"missing or unknown metrics keys: {wrong}"
        self._write({key: record[key] for key in STEP_KEYS}, prefix="train")

    def write_eval(self, record: dict[str, Any]) -> None:
        """Write an evaluation line: step, eval_loss and whatever else was measured."""
        assert {"step", "eval_loss"} <= record.keys(), f"an evaluation has step and eval_loss, got {sorted(record)}"
        self._write(record, prefix="eval")

    def close(self) -> None:
        """Flush and close; harmless when repeated."""
        self._file.close()
        if self._events is not None:
            self._events.close()
            self._events = None

    def _write(self, record: dict[str, Any], *, prefix: str) -> None:
        plain = _finite(record)
        self._file.write(json.dumps(plain, allow_nan=False) + "\n")
        self._file.flush()
        if self._events is not None:
            for key, value in _scalars(plain):
                self._events.add_scalar(f"{prefix}/{key}", value, plain["step"])


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """All lines of a metrics file, in order. A last line that was cut off is left out.

    Raises:
        ValueError: when another line is not JSON, with its number.
    """
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):  # no newline after it: the writer died here
                break
            raise ValueError(f"{path} line {number} is not JSON: {error}") from None
    return records


def _truncate_after(path: Path, step: int) -> None:
    """Rewrite the file without lines of later steps; beside it and renamed, so that a death loses nothing."""
    if not path.exists():
        return
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    beside = path.with_name(path.name + ".tmp")
    beside.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    os.replace(beside, path)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not isfinite(value) else value


def _scalars(record: dict[str, Any]) -> list[tuple[str, float]]:
    """Numbers of a record under flat names, without the step."""
    pairs = []
    for key, value in record.items():
        if isinstance(value, dict):
            pairs += [(f"{key}/{name}", item) for name, item in value.items()]
        elif key != "step" and value is not None:
            pairs.append((key, value))
    return pairs


def _event_writer(directory: Path | str, after_step: int) -> Any:
    require_tensorboard()
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(directory), purge_step=after_step + 1)
