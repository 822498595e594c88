"""Documents of the files that a user names: text files, JSON lines, folders of both, and .gz or .zst of them.

The kind follows from the name: .jsonl, .ndjson and .json hold one JSON object per line; any other named file is one
document of UTF-8 text. In a folder only known text suffixes are taken. Bytes that are not UTF-8 become U+FFFD and are
counted; a NUL character means a binary file, and is refused. Files come in the order given, those of a folder sorted.
"""

import gzip
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import zstandard

TEXT = {".txt", ".md", ".py", ".rst"}
LINES = {".jsonl", ".ndjson", ".json"}
PACKED = {".gz", ".zst"}


@dataclass
class Counts:
    """What reading met besides documents."""

    files: int = 0
    empty: int = 0
    replaced: int = 0
    skipped_files: int = 0


def list_files(names: list[str], counts: Counts) -> list[Path]:
    """All files in reading order; folders are walked.

    Raises:
        ValueError: none named, one is missing, or a folder holds no text file.
    """
    if not names:
        raise ValueError("no input; name text files, .jsonl files, or folders of them")
    missing = [name for name in names if not Path(name).exists()]
    if missing:
        raise ValueError(f"no such file: {', '.join(missing)}")
    return [file for name in names for file in _expand(Path(name), counts)]


def _expand(path: Path, counts: Counts) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.is_file())
    known = [file for file in files if _kind(file) in TEXT | LINES - {".json"}]  # a folder's .json is seldom lines
    counts.skipped_files += len(files) - len(known)
    if not known:
        raise ValueError(f"{path}: no file in this folder ends in {', '.join(sorted(TEXT | LINES - {'.json'}))}")
    return known


def _kind(path: Path) -> str:
    """The suffix that tells the kind, below a .gz or .zst."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() in PACKED else path.suffix.lower()


def read_documents(files: list[Path], *, key: str, counts: Counts) -> Iterator[str]:
    """Yield the text of every document that is not empty, as valid Unicode.

    Raises:
        ValueError: a file is damaged or binary, or a line is not a JSON object with the text `key`: with file and line.
    """
    for path in files:
        counts.files += 1
        lines = _kind(path) in LINES
        try:
            with _open(path) as stream:
                for text in _json_lines(path, stream, key, counts) if lines else [_text(path, stream, counts)]:
                    if text:
                        yield text
                    else:
                        counts.empty += 1
        except (OSError, EOFError, zstandard.ZstdError) as error:  # gzip reports damage as OSError or EOFError
            raise ValueError(f"{path}: cannot be read: {error}") from None


def _open(path: Path) -> BinaryIO:
    if path.suffix.lower() == ".gz":
        return gzip.open(path)
    raw = path.open("rb")
    if path.suffix.lower() != ".zst":
        return raw
    return io.BufferedReader(_ZstdFile(raw), 1 << 20)


class _ZstdFile(io.RawIOBase):
    """A .zst file of any number of frames. The library's own reader takes a truncated file for a shorter one."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw, self._frame, self._ready = raw, None, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        while not self._ready:
            packed = self._raw.read(1 << 17)
            if not packed:
                if self._frame is not None:
                    raise EOFError("the file ends inside a zstd frame; it is truncated")
                return 0
            self._frame = self._frame or zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
            self._ready = self._frame.decompress(packed)
            if self._frame.eof:
                self._raw.seek(-len(self._frame.unused_data), io.SEEK_CUR)
                self._frame = None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


def _text(path: Path, stream: BinaryIO, counts: Counts) -> str:
    text = _decode(stream.read(), counts)
    if "\0" in text:
        raise ValueError(f"{path}: holds NUL characters, so it is not a text file; leave it out")
    return text


def _json_lines(path: Path, stream: BinaryIO, key: str, counts: Counts) -> Iterator[str]:
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(_decode(line, counts))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}; a .jsonl file holds one object per line") from None
        if not isinstance(record, dict) or not isinstance(record.get(key), str):
            have = f"its keys are {', '.join(record)}" if isinstance(record, dict) else "it is not an object"
            raise ValueError(f"{path}:{number}: no text under the key {key!r} ({have}); name the key with --key")
        yield _valid(record[key], counts)


def _decode(data: bytes, counts: Counts) -> str:
    text = data.decode("utf-8-sig", errors="replace")
    if "\ufffd" in text and "\ufffd".encode() not in data:
        counts.replaced += 1
    return text


def _valid(text: str, counts: Counts) -> str:
    """JSON can spell half a surrogate pair, which is no character and has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        counts.replaced += 1
        return text.encode("utf-16", "surrogatepass").decode("utf-16", errors="replace")
    return text
