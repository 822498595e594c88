"""What `megalite checkpoint inspect` and `verify` print. Plain text out; a broken checkpoint is a CheckpointError."""

from math import prod
from pathlib import Path
from typing import Any

from megalite.checkpoint.keep import latest
from megalite.checkpoint.load import Reader
from megalite.checkpoint.manifest import MANIFEST, CheckpointError, Manifest
from megalite.checkpoint.tensorfile import DTYPES

_MODEL_KEYS = ("family", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_size", "vocab_size")


def find(path: Path | str) -> Path:
    """A checkpoint from what a user types: itself, or the newest under a checkpoints/ or run directory."""
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory; give a step_* directory, or a run's directory")
    if (path / MANIFEST).is_file():
        return path
    found = latest(path) or latest(path / "checkpoints")
    if found is None:
        raise CheckpointError(f"{path} holds no complete checkpoint; give a step_* directory, or a run's directory")
    return found


def inspect(path: Path | str, *, list_tensors: bool = True) -> str:
    """Describe a checkpoint: step, what it holds, its size, the layout and model it was saved under, each tensor."""
    with Reader(find(path)) as reader:
        manifest = reader.manifest
        lines = [f"{reader.directory}", *_summary(manifest), *_meta_lines(manifest.meta)]
        if list_tensors:
            lines += ["tensors of main:", *_tensor_lines(manifest)]
    return "\n".join(lines)


def verify(path: Path | str) -> str:
    """Check a checkpoint wholly: manifest digest, coverage, sizes, every file's hash, every box's shape and dtype.

    Raises:
        CheckpointError: naming the first file or tensor that is wrong.
    """
    with Reader(find(path)) as reader:
        reader.verify()
        num_boxes = 0
        for kind, entries in reader.manifest.tensors.items():
            for name in entries:
                num_boxes += reader.check_boxes(kind, name)
        num_bytes = sum(file.num_bytes for file in reader.manifest.files.values())
        return (
            f"{reader.directory} is whole: step {reader.manifest.step}, {len(reader.manifest.files)} files, "
            f"{num_boxes} boxes, {_size(num_bytes)}, all hashes fit, every element is stored once"
        )


def _summary(manifest: Manifest) -> list[str]:
    main = manifest.tensors.get("main", {})
    parameters = sum(prod(entry.shape) for entry in main.values())
    num_bytes = sum(file.num_bytes for file in manifest.files.values())
    kinds = [f"{kind} ({_dtypes(entries)})" for kind, entries in sorted(manifest.tensors.items())]
    return [
        f"step        {manifest.step}",
        f"parameters  {parameters:,} in {len(main)} tensors",
        f"state       {', '.join(kinds)}",
        f"files       {len(manifest.files)}, {_size(num_bytes)}",
    ]


def _dtypes(entries: dict) -> str:
    return " ".join(sorted({str(DTYPES[entry.dtype]).removeprefix("torch.") for entry in entries.values()}))


def _meta_lines(meta: dict[str, Any]) -> list[str]:
    config = meta.get("config") or {}
    lines = []
    if mesh := config.get("mesh"):
        zero = (config.get("zero") or {}).get("stage")
        axes = "  ".join(f"{axis} {mesh[axis]}" for axis in ("pp", "dp", "tp") if axis in mesh)
        lines.append(f"saved under {axes}" + ("" if zero is None else f"  ZeRO-{zero}"))
    if model := config.get("model"):
        lines.append("model       " + "  ".join(f"{k} {model[k]}" for k in _MODEL_KEYS if model.get(k) is not None))
    lines += [f"{key:<11} {_flat(value)}" for key, value in sorted(meta.items()) if key != "config"]
    return lines


def _flat(value: Any) -> str:
    return "  ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def _tensor_lines(manifest: Manifest) -> list[str]:
    entries = manifest.tensors.get("main", {})
    width = max(map(len, entries), default=0)
    return [
        f"  {name:<{width}}  {tuple(entry.shape)!s:<16} {len(entry.stored)} box{'es' if len(entry.stored) > 1 else ''}"
        for name, entry in sorted(entries.items(), key=lambda item: _natural(item[0]))
    ]


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key with numbers as numbers: layers.2 before layers.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.2f} MB"
