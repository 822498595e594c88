"""Saves a sharded state as boxes of logical tensors, all or nothing.

Every rank writes its own file into `.tmp-step_N`; when all have (agreed by a collective), rank 0 checks that each
logical element is stored exactly once, writes the manifest last and renames the directory. A death at any moment
leaves the former checkpoints as they were, and an error on one rank is raised on all with that rank's message.
"""

import os
import shutil
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.boxes import Box, run_boxes
from megalite.checkpoint.exchange import agree, exchange, joined_errors
from megalite.checkpoint.keep import prune, recover
from megalite.checkpoint.manifest import FileEntry, Manifest, Stored, TensorEntry, step_name, write_manifest
from megalite.checkpoint.tensorfile import DTYPE_NAMES, fsync_directory, write_tensors
from megalite.mesh import Group
from megalite.parallel.spec import Piece

State = dict[str, list[Piece]]


class SaveError(RuntimeError):
    """A checkpoint could not be saved; former ones are intact."""


def save(
    root: Path | str, step: int, state: State, *, group: Group, owner: bool, meta: dict[str, Any], keep_last: int = 0
) -> Path:
    """Save `state` as `root/step_N` and return that path; every rank of `group` must call it.

    Args:
        state:     kind ("main", "exp_avg", ...) -> this rank's pieces, fp32 or fp64. Pieces of parts with replica > 0
                   are left out here; tied copies must already be left out.
        group:     all ranks that hold state.
        owner:     False on ranks whose pieces another rank also holds (data parallel replicas): they write nothing.
        meta:      JSON values to store: config, data cursor, seed. Rank 0's are taken.
        keep_last: complete checkpoints to keep, this one included; 0 keeps all.

    Raises:
        SaveError: on all ranks when one of them fails, or when the state is not finite or not whole.

    Communication: three small exchanges over `group`; no state is sent.
    Memory: one box on the CPU at a time.
    """
    root = Path(root)
    temporary, final = root / f".tmp-{step_name(step)}", root / step_name(step)
    _all_or_none(group, None if group.rank else lambda: _prepare(root, temporary))
    fragment = _attempt(lambda: _write_own(temporary, state if owner else {}, group.ranks[group.rank]))
    fragments = exchange(fragment, group)
    failure = joined_errors([f.get("error") for f in fragments], group)
    if failure is not None:
        _discard(temporary, group)
        raise SaveError(f"checkpoint of step {step} not saved, former ones are intact:\n{failure}")
    try:
        _all_or_none(group, None if group.rank else lambda: _finish(temporary, final, _join(step, meta, fragments)))
    except SaveError:
        _discard(temporary, group)
        raise
    if group.rank == 0:
        prune(root, keep_last, just_made=step)
    return final


def _attempt(action) -> dict[str, Any]:
    """Run `action`; an exception becomes {"error": text}, so that the other ranks can be told."""
    try:
        return action() or {}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _all_or_none(group: Group, action) -> None:
    """Run rank 0's action while the others wait; its failure is raised on all."""
    failure = agree(_attempt(action).get("error") if action else None, group)
    if failure is not None:
        raise SaveError(f"checkpoint not saved, former ones are intact:\n{failure}")


def _prepare(root: Path, temporary: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    recover(root)
    temporary.mkdir()


def _discard(temporary: Path, group: Group) -> None:
    if group.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_own(temporary: Path, state: State, rank: int) -> dict[str, Any]:
    """Write this rank's file, if it has anything to write; return what the manifest must know of it."""
    tensors: dict[str, Tensor] = {}
    rows = []
    for kind, pieces in state.items():
        for piece in pieces:
            if piece.part.replica == 0:
                _check_piece(kind, piece)
                rows += [_add_box(tensors, kind, piece, at, box) for at, box in _boxes(piece)]
    if not tensors:
        return {}
    name = f"rank_{rank:05d}.safetensors"
    entry = write_tensors(temporary / name, tensors)
    return {"file": name, "bytes": entry.num_bytes, "sha256": entry.sha256, "rows": rows}


def _boxes(piece: Piece) -> list[tuple[int, Box]]:
    return run_boxes(Box(piece.part.start, piece.part.shape), piece.offset, piece.data.numel())


def _check_piece(kind: str, piece: Piece) -> None:
    part, data = piece.part, piece.data
    assert data.dim() == 1, f"piece of {part.name} is not flat"
    assert piece.offset + data.numel() <= prod(part.shape), f"piece of {part.name} leaves its part"
    if not bool(torch.isfinite(data).all()):
        raise SaveError(f"{kind} of {part.name} holds values that are not finite; resume from a former checkpoint")


def _add_box(tensors: dict[str, Tensor], kind: str, piece: Piece, at: int, box: Box) -> list:
    part = piece.part
    key = f"{kind}/{part.name}{box}"
    if key in tensors:
        raise SaveError(f"{kind} of {part.name}{box} is given twice by one rank")
    tensors[key] = piece.data[at : at + box.numel].view(box.shape)
    dtype = DTYPE_NAMES[piece.data.dtype]
    return [kind, part.name, dtype, list(part.global_shape), list(box.start), list(box.shape), key]


def _join(step: int, meta: dict[str, Any], fragments: list[dict[str, Any]]) -> Manifest:
    """The manifest of all ranks' files."""
    manifest = Manifest(step, meta)
    for fragment in fragments:
        if not fragment:
            continue
        manifest.files[fragment["file"]] = FileEntry(fragment["bytes"], fragment["sha256"])
        for kind, name, dtype, shape, start, box_shape, key in fragment["rows"]:
            entry = manifest.tensors.setdefault(kind, {}).setdefault(name, TensorEntry(dtype, tuple(shape)))
            if (entry.dtype, entry.shape) != (dtype, tuple(shape)):
                raise SaveError(f"ranks disagree on {kind} of {name}: {entry.shape} {entry.dtype}, {shape} {dtype}")
            entry.stored.append(Stored(Box(tuple(start), tuple(box_shape)), fragment["file"], key))
    return manifest


def _finish(temporary: Path, final: Path, manifest: Manifest) -> None:
    """Complete the checkpoint: manifest last, then one rename."""
    problems = manifest.problems()
    if problems:
        raise SaveError("the state is not whole: " + "; ".join(problems[:4]))
    write_manifest(temporary, manifest)
    fsync_directory(temporary)
    if final.exists():  # the same step once more: the old one stays loadable until the new one is in its place
        os.rename(final, final.with_name(f".old-{final.name}"))
    os.rename(temporary, final)
    fsync_directory(final.parent)
