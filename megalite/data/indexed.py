"""Reader of Megatron's indexed datasets: PREFIX.bin (raw tokens) and PREFIX.idx (where sequences and documents lie).

Little-endian, without padding: 9 bytes magic, u64 version 1, u8 dtype code, u64 number of sequences S, u64 number of
document indices D + 1, then i32[S] lengths, i64[S] byte offsets, i64[D + 1] document indices, and i8[S] modes when
multimodal. A document is a run of whole sequences. Everything is checked when a corpus is opened, so a damaged pair is
refused before the first step and never read past its end.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
CODES = {name: code for code, name in DTYPES.items()}


@dataclass(frozen=True)
class Indexed:
    """An open corpus. `tokens` is mapped from disk, all sequences end to end.

    tokens:           (num_tokens,) of the stored integer type, read-only.
    sequence_lengths: (S,) int32, in tokens.
    document_starts:  (D + 1,) int64, the token at which each document begins; the last entry is num_tokens.
    """

    prefix: str
    tokens: np.ndarray
    sequence_lengths: np.ndarray
    document_starts: np.ndarray

    @property
    def num_documents(self) -> int:
        """Documents, empty ones included."""
        return len(self.document_starts) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return len(self.tokens)

    @property
    def document_lengths(self) -> np.ndarray:
        """(D,) int64, in tokens."""
        return np.diff(self.document_starts)

    def document(self, index: int) -> np.ndarray:
        """The tokens of one document, a view of the file."""
        return self.tokens[self.document_starts[index] : self.document_starts[index + 1]]

    def sequence(self, index: int) -> np.ndarray:
        """The tokens of one sequence, a view of the file."""
        start = int(self.sequence_lengths[:index].sum(dtype=np.int64))
        return self.tokens[start : start + int(self.sequence_lengths[index])]


def open_indexed(prefix: str) -> Indexed:
    """Open PREFIX.bin and PREFIX.idx.

    Memory: the tokens stay on disk; 12 bytes per sequence and 8 per document are held.

    Raises:
        ValueError: a file is missing, truncated, of another format, or the two do not belong together.
    """
    idx, bin_ = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (idx, bin_):
        if not path.is_file():
            raise ValueError(f"{path}: no such file; a corpus is given as the common prefix of its .bin and .idx")
    dtype, lengths, offsets, documents = _read_idx(idx)
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, dtype=np.int64, out=starts[1:])
    if not np.array_equal(offsets, starts[:-1] * dtype.itemsize):
        raise ValueError(f"{idx}: the byte offsets are not the running sum of the lengths x {dtype.itemsize} bytes")
    want, have = int(starts[-1]) * dtype.itemsize, bin_.stat().st_size
    if want != have:
        raise ValueError(
            f"{bin_}: {have} bytes, but {idx.name} describes {starts[-1]} tokens of {dtype.itemsize} bytes = {want} "
            f"bytes; the two files are not of one corpus, or the copy is incomplete"
        )
    if have == 0:  # an empty file can't be mapped either
        raise ValueError(f"{bin_}: the corpus is empty")
    return Indexed(prefix, np.memmap(bin_, dtype, mode="r"), lengths, starts[documents])


def _read_idx(path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """Token type, sequence lengths, byte offsets and document indices, each checked on its own."""
    data = path.read_bytes()
    dtype, num_sequences, num_indices = _header(path, data)
    end = HEADER.size + 12 * num_sequences + 8 * num_indices
    if len(data) not in (end, end + num_sequences):
        raise ValueError(
            f"{path}: {len(data)} bytes, but its header ({num_sequences} sequences, {num_indices} document indices) "
            f"needs {end}, or {end + num_sequences} with modes; the file is truncated or damaged"
        )
    lengths = np.frombuffer(data, "<i4", num_sequences, HEADER.size).copy()  # copies: the file's arrays are unaligned
    offsets = np.frombuffer(data, "<i8", num_sequences, HEADER.size + 4 * num_sequences)
    documents = np.frombuffer(data, "<i8", num_indices, HEADER.size + 12 * num_sequences).copy()
    if (lengths < 0).any():
        raise ValueError(f"{path}: sequence {int(np.argmax(lengths < 0))} has a negative length")
    if num_indices == 0 or documents[0] != 0 or documents[-1] != num_sequences or (np.diff(documents) < 0).any():
        raise ValueError(f"{path}: the document indices do not rise from 0 to the {num_sequences} sequences")
    return dtype, lengths, offsets, documents


def _header(path: Path, data: bytes) -> tuple[np.dtype, int, int]:
    if len(data) < HEADER.size:
        raise ValueError(f"{path}: {len(data)} bytes, less than the {HEADER.size} of the header; the file is truncated")
    magic, version, code, num_sequences, num_indices = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ValueError(f"{path}: starts with {data[:9]!r}, not {MAGIC!r}; this is not a Megatron index")
    if version != 1:
        raise ValueError(f"{path}: version {version}; only version 1 is known")
    name = DTYPES.get(code, f"unknown code {code}")
    if name.startswith(("float", "unknown")):
        raise ValueError(f"{path}: dtype {name}; tokens must be integers (codes 1 to 5 and 8)")
    return np.dtype(name).newbyteorder("<"), num_sequences, num_indices
