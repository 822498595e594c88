"""Which checkpoints exist, which is the newest whole one, and which may go.

Invariant: only directories named by `save` are ever touched, the checkpoint just made is never deleted, and an
incomplete one is never chosen. Steps are compared as numbers.
"""

import os
import re
import shutil
from pathlib import Path

from megalite.checkpoint.exchange import exchange
from megalite.checkpoint.manifest import MANIFEST, STEP_DIR, CheckpointError, check_sizes, read_manifest, step_name
from megalite.mesh import Group
from megalite.observe.log import get_logger

_OLD_DIR = re.compile(r"\.old-(step_\d{8,})")
_TEMPORARY_DIR = re.compile(r"\.tmp-(deleted-)?step_\d{8,}")


def latest(root: Path | str) -> Path | None:
    """The newest complete checkpoint under `root`, or None: a whole manifest, all files in their full size.

    Contents are not hashed; `load` does that.
    """
    for path in sorted(_candidates(Path(root)), key=lambda p: (_step_of(p), p.name[0] != "."), reverse=True):
        try:
            manifest = read_manifest(path)
            if manifest.step != _step_of(path):
                raise CheckpointError(f"{path} holds step {manifest.step}")
            check_sizes(path, manifest)
        except (CheckpointError, OSError) as error:
            get_logger().warning("checkpoint %s skipped: %s", path, error)
            continue
        return path
    return None


def resolve(resume: str, root: Path | str, *, group: Group | None = None) -> Path | None:
    """Turn `checkpoint.resume` into a checkpoint to load: auto (the newest of `root`, if any), none, or a path.

    With a group, rank 0 decides and all ranks get its answer, so a slow shared file system can't split them.

    Raises:
        ValueError: on all ranks when the path is not a complete checkpoint.
    """
    answer = {}
    if group is None or group.rank == 0:
        try:
            path = _resolve(resume, Path(root))
            answer = {"path": None if path is None else str(path)}
        except ValueError as error:
            answer = {"error": str(error)}
    if group is not None:
        answer = exchange(answer, group)[0]
    if "error" in answer:
        raise CheckpointError(answer["error"])
    return None if answer["path"] is None else Path(answer["path"])


def _resolve(resume: str, root: Path) -> Path | None:
    if resume == "none":
        return None
    if resume == "auto":
        return latest(root)
    path = Path(resume)
    if not path.is_dir():
        raise CheckpointError(f"checkpoint.resume={resume} is not a directory; use auto, none or a step_* directory")
    if not (path / MANIFEST).is_file():
        newest = latest(path) or latest(path / "checkpoints")
        hint = f"; did you mean {newest}?" if newest else "; use auto, none or a step_* directory"
        raise CheckpointError(f"checkpoint.resume={resume} is not a complete checkpoint: it has no {MANIFEST}{hint}")
    check_sizes(path, read_manifest(path))
    return path


def prune(root: Path, keep_last: int, *, just_made: int) -> None:
    """Keep the `keep_last` newest complete checkpoints up to step `just_made` (0: all); a failure is only logged.

    Checkpoints of *later* steps belong to a run that was abandoned when this one went back before them. They are
    renamed to `superseded_step_N`, so that `latest` can't return to them, and never deleted.
    """
    try:
        complete = [p for p in _candidates(root) if p.name[0] != "." and (p / MANIFEST).is_file()]
        for path in (p for p in complete if _step_of(p) > just_made):
            _set_aside(path)
        own = sorted((p for p in complete if _step_of(p) <= just_made), key=_step_of)
        extra = own[:-keep_last] if keep_last else []
        old = [p for p in _children(root) if _OLD_DIR.fullmatch(p.name)]
        for path in [p for p in extra if _step_of(p) != just_made] + old:
            _delete(path)
    except OSError as error:
        get_logger().warning("older checkpoints under %s not cleaned up: %s", root, error)


def recover(root: Path) -> None:
    """Clean up after a run that died while saving: half-written directories go, a set-aside checkpoint comes back."""
    for path in _children(root):
        if _TEMPORARY_DIR.fullmatch(path.name):
            get_logger().info("removing %s, left by a save that did not finish", path)
            shutil.rmtree(path, ignore_errors=True)
        elif old := _OLD_DIR.fullmatch(path.name):
            if (root / old.group(1)).exists():
                _delete(path)
            else:
                os.rename(path, root / old.group(1))


def _children(root: Path) -> list[Path]:
    return sorted(p for p in root.iterdir() if p.is_dir()) if root.is_dir() else []


def _candidates(root: Path) -> list[Path]:
    return [p for p in _children(root) if STEP_DIR.fullmatch(p.name) or _OLD_DIR.fullmatch(p.name)]


def _step_of(path: Path) -> int:
    return int(path.name.rpartition("_")[2])


def _delete(path: Path) -> None:
    """Delete so that a death half-way leaves nothing that looks complete, but something that `recover` deletes."""
    doomed = path.with_name(f".tmp-deleted-{step_name(_step_of(path))}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def _set_aside(path: Path) -> None:
    target = path.with_name(f"superseded_{path.name}")
    count = 1
    while target.exists():
        count += 1
        target = path.with_name(f"superseded_{path.name}_{count}")
    get_logger().warning("%s is from an abandoned run with later steps; renamed to %s", path, target.name)
    os.rename(path, target)
