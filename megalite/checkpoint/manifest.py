"""The manifest: what a checkpoint holds and where. Its presence, whole, is what makes a checkpoint complete.

`step_00000100/manifest.json` lists for every kind of state (main, exp_avg, ...) and logical tensor the dtype, the
global shape and the boxes with their file and key; for every file its size and sha256; and `meta`, free JSON of the
trainer (config, data cursor, seed). A digest over the rest shows a manifest that was damaged or edited.
"""

import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalite.checkpoint.boxes import Box, coverage_fault

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
STEP_DIR = re.compile(r"step_(\d{8,})")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
_CHUNK_BYTES = 1 << 22


class CheckpointError(ValueError):
    """A checkpoint that can't be used, with the file and what is wrong with it."""


@dataclass(frozen=True)
class Stored:
    """A box of a logical tensor and the place of its values."""

    box: Box
    file: str
    key: str


@dataclass
class TensorEntry:
    """One kind of state of one logical tensor."""

    dtype: str
    shape: tuple[int, ...]
    stored: list[Stored] = field(default_factory=list)


@dataclass(frozen=True)
class FileEntry:
    """Size and sha256 of one file."""

    num_bytes: int
    sha256: str


@dataclass
class Manifest:
    """Everything of a checkpoint but the values. `tensors[kind][name]`, `files[file name]`."""

    step: int
    meta: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, dict[str, TensorEntry]] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)

    def problems(self) -> list[str]:
        """What is inconsistent: an element missing or stored twice, a file not listed, kinds with different tensors."""
        found = []
        for kind, entries in sorted(self.tensors.items()):
            for name, entry in sorted(entries.items()):
                fault = coverage_fault(entry.shape, [stored.box for stored in entry.stored])
                found += [f"{kind} of {name} {entry.shape}: {fault}"] if fault else []
                unknown = sorted({stored.file for stored in entry.stored} - self.files.keys())
                found += [f"{kind} of {name}: file {unknown[0]} is not listed"] if unknown else []
        main = self.tensors.get("main", {})
        for kind, entries in sorted(self.tensors.items()):
            other = sorted(main.keys() ^ entries.keys())
            found += [f"{kind} and main hold different tensors: {other[0]}"] if other else []
        return found

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values, without the digest."""
        return {
            "format_version": FORMAT_VERSION,
            "step": self.step,
            "meta": self.meta,
            "tensors": {
                kind: {name: _entry_json(entry) for name, entry in sorted(entries.items())}
                for kind, entries in sorted(self.tensors.items())
            },
            "files": {name: {"bytes": f.num_bytes, "sha256": f.sha256} for name, f in sorted(self.files.items())},
        }


def _entry_json(entry: TensorEntry) -> dict[str, Any]:
    rows = sorted([list(s.box.start), list(s.box.shape), s.file, s.key] for s in entry.stored)
    return {"dtype": entry.dtype, "shape": list(entry.shape), "boxes": rows}


def _entry_from_json(value: dict[str, Any]) -> TensorEntry:
    stored = [Stored(Box(tuple(start), tuple(shape)), file, key) for start, shape, file, key in value["boxes"]]
    return TensorEntry(value["dtype"], tuple(value["shape"]), stored)


def _digest(plain: dict[str, Any]) -> str:
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def step_name(step: int) -> str:
    """The directory name of a step."""
    return f"step_{step:08d}"


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write and fsync the manifest; the last thing that is written into a checkpoint."""
    plain = json.loads(json.dumps(manifest.to_json()))  # tuples become lists, as a reader will see them
    with open(directory / MANIFEST, "w", encoding="utf-8") as file:
        json.dump({"digest": _digest(plain), **plain}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(directory: Path) -> Manifest:
    """Read and check the manifest itself: it parses, its digest fits, its format is known. Values are not read."""
    path = Path(directory) / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{directory} is not a complete checkpoint: it has no {MANIFEST}")
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        digest, version = plain.pop("digest"), plain["format_version"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format_version {version}, this megalite reads {FORMAT_VERSION}; "
            "read it with the version that wrote it"
        )
    if digest != _digest(plain):
        raise CheckpointError(f"{path} is damaged: its content does not fit its digest")
    return _from_json(path, plain)


def _from_json(path: Path, plain: dict[str, Any]) -> Manifest:
    for name in plain["files"]:
        if not _FILE_NAME.fullmatch(name):
            raise CheckpointError(f"{path} names the file {name!r}, which is not a plain .safetensors name")
    return Manifest(
        step=plain["step"],
        meta=plain["meta"],
        tensors={
            kind: {name: _entry_from_json(value) for name, value in entries.items()}
            for kind, entries in plain["tensors"].items()
        },
        files={name: FileEntry(value["bytes"], value["sha256"]) for name, value in plain["files"].items()},
    )


def check_sizes(directory: Path, manifest: Manifest) -> None:
    """Raise CheckpointError when a file is missing or has another size than when it was written."""
    for name, entry in manifest.files.items():
        path = Path(directory) / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if path.stat().st_size != entry.num_bytes:
            raise CheckpointError(f"{path} is truncated or changed: {path.stat().st_size} of {entry.num_bytes} bytes")


def check_hash(directory: Path, name: str, entry: FileEntry) -> None:
    """Raise CheckpointError when a file's bytes are not those that were written."""
    digest = hashlib.sha256()
    with open(Path(directory) / name, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != entry.sha256:
        raise CheckpointError(f"{Path(directory) / name} is corrupted: its sha256 differs from the manifest's")
