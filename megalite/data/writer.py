"""Writer of indexed datasets: streams tokens to a temporary file and takes the final names only when complete.

A kill at any moment leaves either the old corpus, or none (the .idx is the last to appear), never a mixture that reads
as valid. Several processes may make the same new corpus at once: each has its own temporary names, and none removes
what another has completed. (Replacing an *old* corpus is for one process: its index goes before the new one comes.)
"""

import filecmp
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from megalite.data.indexed import CODES, HEADER, MAGIC


def token_dtype(vocab_size: int) -> np.dtype:
    """The stored type of a vocabulary: Megatron's rule, uint16 below 65500 and int32 from there."""
    return np.dtype("<u2" if vocab_size < 65500 else "<i4")


def write_atomic(path: Path, data: bytes) -> None:
    """Write a whole file under a temporary name in the same directory and rename it."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        _write_synced(temporary, data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _all_equal(files: dict[Path, bytes]) -> bool:
    return all(path.exists() and path.read_bytes() == data for path, data in files.items())


class IndexedWriter:
    """Writes one corpus; a context manager that keeps nothing when the block fails.

    `extra` files (sidecar, tokenizer) are renamed together with the corpus: see `finish`.
    """

    def __init__(self, prefix: str, dtype: np.dtype, *, vocab_size: int) -> None:
        self.prefix, self.dtype, self.vocab_size = prefix, np.dtype(dtype), vocab_size
        self.num_tokens = 0
        self._lengths: list[int] = []
        self._documents: list[int] = [0]
        self._suffix = f".{uuid.uuid4().hex}.tmp"
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
        self._bin = open(f"{prefix}.bin{self._suffix}", "wb")  # noqa: SIM115 - closed in __exit__

    @property
    def num_documents(self) -> int:
        """Documents written so far."""
        return len(self._documents) - 1

    def add_document(self, *sequences: Sequence[int] | np.ndarray) -> None:
        """Append one document, usually of one sequence; its last token should be the end-of-document token.

        Raises:
            ValueError: an id is negative or not below vocab_size, or a sequence has 2**31 tokens or more.
        """
        for sequence in sequences:
            ids = np.asarray(sequence, dtype=np.int64)  # wide first: a narrow cast would wrap silently
            if ids.size and (ids.min() < 0 or ids.max() >= self.vocab_size):
                bad = int(ids[(ids < 0) | (ids >= self.vocab_size)][0])
                raise ValueError(f"{self.prefix}: token id {bad} is outside the vocabulary of {self.vocab_size}")
            if ids.size >= 2**31:
                raise ValueError(f"{self.prefix}: a document of {ids.size} tokens; the format's limit is 2**31 - 1")
            self._bin.write(ids.astype(self.dtype).tobytes())
            self._lengths.append(ids.size)
            self.num_tokens += ids.size
        self._documents.append(len(self._lengths))

    def finish(self, extra: dict[Path, bytes] | None = None) -> None:
        """Give the files their final names: .bin, then `extra` (path -> content), then .idx, which makes a corpus."""
        idx, bin_ = Path(f"{self.prefix}.idx"), Path(f"{self.prefix}.bin")
        new_idx = Path(f"{idx}{self._suffix}")
        _write_synced(new_idx, self._index())
        self._bin.flush()
        os.fsync(self._bin.fileno())
        extra = extra or {}
        # An old index must not be seen beside new tokens. Where there was none, one that has appeared since is a faster
        # process' same corpus, perhaps being read already: it stays.
        if idx.exists() and not (filecmp.cmp(idx, new_idx, shallow=False) and _all_equal(extra)):
            idx.unlink(missing_ok=True)
        Path(self._bin.name).replace(bin_)
        for path, data in extra.items():
            write_atomic(path, data)
        new_idx.replace(idx)

    def _index(self) -> bytes:
        lengths = np.array(self._lengths, "<i4")
        offsets = np.zeros(len(lengths), "<i8")
        np.cumsum(lengths[:-1], dtype=np.int64, out=offsets[1:])
        documents = np.array(self._documents, "<i8")
        code = CODES[self.dtype.newbyteorder("=").name]
        header = HEADER.pack(MAGIC, 1, code, len(lengths), len(documents))
        return b"".join([header, lengths.tobytes(), (offsets * self.dtype.itemsize).tobytes(), documents.tobytes()])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bin.close()
        for name in ("bin", "idx"):
            Path(f"{self.prefix}.{name}{self._suffix}").unlink(missing_ok=True)
