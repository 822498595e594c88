"""What is known of a corpus besides its tokens: PREFIX.json, written by `data prepare`.

A corpus from elsewhere (Megatron) has none, and nothing but its tokens is then known. A PREFIX.json that megalite did
not write is not ours to read or to replace; the `format` key tells them apart.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

FORMAT = "megalite-corpus-1"


@dataclass(frozen=True)
class Sidecar:
    """The record of one prepared corpus.

    tokenizer:        `byte`, or the name that was given to prepare; the file itself lies at PREFIX.tokenizer.json.
    tokenizer_sha256: of that file, "" for `byte`; corpora that are blended must agree on it.
    text_sha256:      of the text of all documents in order, each followed by a zero byte.
    """

    tokenizer: str
    tokenizer_sha256: str
    vocab_size: int
    eod_id: int
    num_documents: int
    num_tokens: int
    text_sha256: str
    text_bytes: int


def sidecar_path(prefix: str) -> Path:
    """Where the record of a corpus lies."""
    return Path(f"{prefix}.json")


def tokenizer_path(prefix: str) -> Path:
    """Where the tokenizer of a corpus lies, unless it is `byte`."""
    return Path(f"{prefix}.tokenizer.json")


def to_json(sidecar: Sidecar) -> str:
    """The file's text."""
    return json.dumps({"format": FORMAT, **asdict(sidecar)}, indent=1) + "\n"


def read_sidecar(prefix: str) -> Sidecar | None:
    """Read PREFIX.json; None when there is none or when megalite did not write it.

    Raises:
        ValueError: it is ours by its `format`, but its fields are not those of this version.
    """
    path = sidecar_path(prefix)
    try:
        fields = json.loads(path.read_text())
    except (FileNotFoundError, UnicodeDecodeError, json.JSONDecodeError):
        return None
    if not isinstance(fields, dict) or not str(fields.get("format", "")).startswith("megalite-corpus"):
        return None
    version = fields.pop("format")
    if version != FORMAT or set(fields) != set(Sidecar.__dataclass_fields__):
        raise ValueError(f"{path}: {version} with fields {sorted(fields)} is not {FORMAT}; prepare the corpus again")
    return Sidecar(**fields)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
