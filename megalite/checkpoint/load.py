"""Loads a checkpoint into any layout: each piece is filled from the stored boxes that intersect it.

Values are read through safetensors slices, so a rank reads only what it needs. Nothing is unpickled. With a group, all
ranks load or all raise; the hashing of files is shared out between them. Values are never rounded unless asked for.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megalite.checkpoint.boxes import Box, intersect, run_boxes
from megalite.checkpoint.exchange import exchange, joined_errors
from megalite.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    TensorEntry,
    check_hash,
    check_sizes,
    read_manifest,
)
from megalite.checkpoint.tensorfile import DTYPES
from megalite.mesh import Group
from megalite.parallel.spec import Piece


class Reader:
    """An open checkpoint: reads any box of any tensor. Files are opened when first needed; use it in a `with`."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self.manifest: Manifest = read_manifest(self.directory)
        check_sizes(self.directory, self.manifest)
        problems = self.manifest.problems()
        if problems:
            raise CheckpointError(f"{self.directory} is not whole: {'; '.join(problems[:4])}")
        self._open: dict[str, Any] = {}

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *exc_info: object) -> None:
        for file in self._open.values():
            file.__exit__(None, None, None)
        self._open.clear()

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Hash the named files (default all); CheckpointError names the first that differs."""
        for name in sorted(self.manifest.files) if names is None else names:
            check_hash(self.directory, name, self.manifest.files[name])

    def entry(self, kind: str, name: str) -> TensorEntry:
        """The manifest's entry; CheckpointError when there is none."""
        entries = self.manifest.tensors.get(kind)
        if entries is None:
            has = ", ".join(sorted(self.manifest.tensors))
            raise CheckpointError(
                f"{self.directory} has no {kind}, only {has}; load with kinds=('main',) for weights only"
            )
        if name not in entries:
            raise CheckpointError(f"{self.directory} has no {kind} of {name}; the model is not the one that was saved")
        return entries[name]

    def fill(self, out: Tensor, kind: str, name: str, *, box: Box) -> None:
        """Copy `box` of a logical tensor into `out`, a tensor of the box's shape."""
        done = 0
        for stored in self.entry(kind, name).stored:
            common = intersect(box, stored.box)
            if common is not None:
                values = self._lazy(stored.file, stored.key)[common.within(stored.box)]
                out[common.within(box)].copy_(values)
                done += common.numel
        if done != box.numel:
            raise CheckpointError(f"{self.directory}: {kind} of {name}{box} has {done} of {box.numel} elements")

    def tensor(self, kind: str, name: str) -> Tensor:
        """A whole logical tensor, in the dtype it was saved in."""
        entry = self.entry(kind, name)
        out = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        self.fill(out, kind, name, box=Box((0,) * len(entry.shape), entry.shape))
        return out

    def files_of(self, state: dict[str, list[Piece]]) -> set[str]:
        """Names of the files that loading `state` reads."""
        return {
            stored.file
            for kind, pieces in state.items()
            for piece in pieces
            for stored in self.entry(kind, piece.part.name).stored
            if any(intersect(box, stored.box) for _, box in _piece_boxes(piece))
        }

    def check_boxes(self, kind: str, name: str) -> int:
        """Check that each stored box has the manifest's shape and dtype in its file; return the number of boxes."""
        entry = self.entry(kind, name)
        for stored in entry.stored:
            found = self._lazy(stored.file, stored.key)
            if (tuple(found.get_shape()), found.get_dtype()) != (stored.box.shape, entry.dtype):
                raise CheckpointError(
                    f"{self.directory / stored.file}: {stored.key} is {found.get_shape()} {found.get_dtype()}, "
                    f"the manifest says {list(stored.box.shape)} {entry.dtype}"
                )
        return len(entry.stored)

    def _lazy(self, file: str, key: str) -> Any:
        """A tensor of a file, not yet read."""
        path = self.directory / file
        try:
            if file not in self._open:
                self._open[file] = safe_open(path, framework="pt").__enter__()
            return self._open[file].get_slice(key)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} can't be read: {key}: {error}") from None


def load(
    directory: Path | str,
    state: dict[str, list[Piece]],
    *,
    group: Group | None = None,
    verify: bool = True,
    kinds: tuple[str, ...] | None = None,
    downcast: bool = False,
) -> dict[str, Any]:
    """Fill the pieces of `state` in place from a checkpoint of any layout and return its meta.

    Args:
        state:    kind -> this rank's pieces; replicas and tied copies are filled too.
        group:    all ranks that load together, when there are several: they raise together, share the hashing, and
                  check that the checkpoint holds nothing that none of them asked for.
        verify:   hash the files before anything is read.
        kinds:    kinds to load; default all of `state`. ("main",) loads weights only.
        downcast: allow fp64 values to be rounded into fp32 pieces. Widening is exact and always allowed.

    Raises:
        CheckpointError: naming the file or tensor and what is wrong; `state` may then be partly filled.

    Communication: two small exchanges over `group`; every rank reads the files itself.
    """
    wanted = {kind: pieces for kind, pieces in state.items() if kinds is None or kind in kinds}
    alone = group is None
    group = group or Group("world")
    reader: Reader | None = None

    def check() -> dict[str, Any]:
        nonlocal reader
        reader = Reader(directory)
        _check_pieces(reader, wanted, downcast=downcast)
        if verify:
            files = sorted(reader.files_of(wanted) if alone else reader.manifest.files)
            reader.verify(files[group.rank :: group.size])
        return {kind: sorted({piece.part.name for piece in pieces}) for kind, pieces in wanted.items()}

    asked = _together(check, group)
    if not alone:
        _check_nothing_left(reader, asked)
    with reader:
        _together(lambda: _fill_all(reader, wanted), group)
    return reader.manifest.meta


def _together(action: Callable[[], Any], group: Group) -> list[Any]:
    """Run `action` on every rank and share its JSON results; when any rank fails, all raise the same error."""
    cause, answer = None, {}
    try:
        answer = {"value": action()}
    except Exception as error:
        cause = error
        answer = {"error": str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"}
    answers = exchange(answer, group)
    failure = joined_errors([a.get("error") for a in answers], group)
    if failure is not None:
        raise CheckpointError(failure) from cause
    return [a["value"] for a in answers]


def _check_pieces(reader: Reader, state: dict[str, list[Piece]], *, downcast: bool) -> None:
    """Every piece has its tensor, of the same shape, in a dtype that fits; before any value is changed."""
    for kind, pieces in state.items():
        for piece in pieces:
            part, entry = piece.part, reader.entry(kind, piece.part.name)
            if entry.shape != part.global_shape:
                raise CheckpointError(
                    f"{reader.directory}: {kind} of {part.name} has shape {entry.shape}, "
                    f"the model's is {part.global_shape}; the model is not the one that was saved"
                )
            saved, own = DTYPES[entry.dtype], piece.data.dtype
            if torch.promote_types(saved, own) != own and not downcast:
                raise CheckpointError(
                    f"{reader.directory}: {kind} of {part.name} is {saved}, loading it as {own} would round it; "
                    "use the precision it was saved in, or allow it with downcast"
                )


def _check_nothing_left(reader: Reader, asked: list[dict[str, list[str]]]) -> None:
    """Refuse a checkpoint of a larger model: some of its tensors were asked for by no rank."""
    for kind in sorted({kind for rank in asked for kind in rank}):
        left = set(reader.manifest.tensors[kind]).difference(*(rank.get(kind, ()) for rank in asked))
        if left:
            raise CheckpointError(
                f"{reader.directory} holds {len(left)} tensors that the model does not have, e.g. {min(left)}; "
                "the model is not the one that was saved"
            )


def _fill_all(reader: Reader, state: dict[str, list[Piece]]) -> None:
    for kind, pieces in state.items():
        for piece in pieces:
            for at, box in _piece_boxes(piece):
                out = piece.data[at : at + box.numel].view(box.shape)
                reader.fill(out, kind, piece.part.name, box=box)


def _piece_boxes(piece: Piece) -> list[tuple[int, Box]]:
    return run_boxes(Box(piece.part.start, piece.part.shape), piece.offset, piece.data.numel())
