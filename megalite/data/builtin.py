"""Corpora that every Python carries: nothing is shipped or downloaded.

builtin:docs is the language reference (`pydoc_data.topics`, one document per topic, 0.5 MB of English), builtin:stdlib
the standard library's sources without its tests (12 MB). Both are prepared with the byte tokenizer on first use. Their
bytes differ between Python versions, hence the version in the name that the corpus records, and the checksum.
"""

import hashlib
import logging
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics

from megalite.data.sidecar import Sidecar, sidecar_path, to_json
from megalite.data.tokenizer import ByteTokenizer
from megalite.data.writer import IndexedWriter, token_dtype

BUILTIN = "builtin:"
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
log = logging.getLogger("megalite")


def builtin_prefix(path: str, *, cache_dir: str) -> str:
    """Prefix of a builtin corpus below `cache_dir`; it is made there when it is not there yet.

    Any number of processes may ask at once: each writes the same bytes under its own temporary names, and the first
    complete corpus is as good as the last.

    Raises:
        ValueError: no such builtin, or this Python's sources are not on disk.
    """
    sources = {"docs": _docs, "stdlib": _stdlib}
    name = path.removeprefix(BUILTIN)
    if name not in sources:
        raise ValueError(f"data path {path}: no such builtin corpus; use {' or '.join(BUILTIN + s for s in sources)}")
    prefix = str(Path(cache_dir) / f"builtin_{name}")
    if not Path(f"{prefix}.idx").exists():  # it appears last
        _prepare(path, sources[name](), prefix)
    return prefix


def _prepare(path: str, documents: Iterator[str], prefix: str) -> None:
    tokenizer, digest, num_bytes = ByteTokenizer(), hashlib.sha256(), 0
    with IndexedWriter(prefix, token_dtype(tokenizer.vocab_size), vocab_size=tokenizer.vocab_size) as writer:
        for text in documents:
            data = text.encode()
            digest.update(data + b"\0")
            num_bytes += len(data)
            writer.add_document([*data, tokenizer.eod_id])
        if not writer.num_documents:
            raise ValueError(f"data path {path}: this Python ({platform.python_version()}) has no such texts on disk")
        record = Sidecar("byte", "", 257, 256, writer.num_documents, writer.num_tokens, digest.hexdigest(), num_bytes)
        writer.finish({sidecar_path(prefix): to_json(record).encode()})
    made_from = platform.python_version()
    log.info("made %s from Python %s: %d bytes, sha256 %s", prefix, made_from, num_bytes, digest.hexdigest())


def _docs() -> Iterator[str]:
    return (topics.topics[name] for name in sorted(topics.topics))


def _stdlib() -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = ((file.relative_to(root).as_posix(), file) for file in root.rglob("*.py"))
    for name, file in sorted(files):
        text = file.read_bytes().decode(errors="replace")
        if text and not SKIPPED.intersection(Path(name).parts):
            yield text
