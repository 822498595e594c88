"""`megalite data prepare`: text to an indexed corpus, in parallel, with a result that does not depend on the workers.

The parent reads documents in order and hands batches to workers; results come back in the same order and are written as
they come, the end-of-document id appended to every document. Empty documents are left out and counted. Everything that
can be refused is refused before the first write, and the files take their names only when complete; an older corpus of
the same name is then replaced.
"""

import hashlib
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from megalite.data.readers import Counts, list_files, read_documents
from megalite.data.sidecar import Sidecar, file_sha256, read_sidecar, sidecar_path, to_json, tokenizer_path
from megalite.data.tokenizer import Tokenizer, load_tokenizer, resolve, train_bpe, trained_vocab
from megalite.data.writer import IndexedWriter, token_dtype
from megalite.observe.outputs import check_output_folder

BATCH_CHARS = 1 << 20
SERIAL_BYTES = 4 << 20
"""Inputs below this are not worth starting workers for."""


@dataclass(frozen=True)
class Summary:
    """What `prepare` did; printing it gives the lines that the command shows."""

    prefix: str
    sidecar: Sidecar
    counts: Counts

    def __str__(self) -> str:
        s, c = self.sidecar, self.counts
        notes = {"empty documents left out": c.empty, "documents with bytes that are not UTF-8": c.replaced}
        notes["other files in the folders left out"] = c.skipped_files
        lines = [
            f"{self.prefix}: {s.num_documents:,} documents, {s.num_tokens:,} tokens from {c.files:,} files "
            f"({s.text_bytes:,} bytes, {s.text_bytes / s.num_tokens:.2f} per token)",
            f"tokenizer {s.tokenizer}, vocabulary {s.vocab_size}, end of document {s.eod_id}; set model.vocab_size to "
            f"{s.vocab_size} or more",
            f"text sha256 {s.text_sha256}",
        ]
        return "\n".join(lines + [f"{count:,} {what}" for what, count in notes.items() if count])


class _Digest:
    """Passes texts on and keeps their checksum, size and number."""

    def __init__(self, texts: Iterator[str]) -> None:
        self._texts, self._hash, self.num_bytes = texts, hashlib.sha256(), 0

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            data = text.encode()
            self._hash.update(data + b"\0")
            self.num_bytes += len(data)
            yield text

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


@dataclass(frozen=True)
class _Job:
    """What was asked for, checked."""

    inputs: list[Path]
    tokenizer: str
    output: str
    workers: int
    key: str
    eod: str | None
    counts: Counts


def prepare(
    files: list[str],
    *,
    tokenizer: str,
    output: str,
    workers: int | None = None,
    key: str = "text",
    eod: str | None = None,
) -> Summary:
    """Make the corpus OUTPUT.bin, OUTPUT.idx and OUTPUT.json from text files, and OUTPUT.tokenizer.json unless `byte`.

    Args:
        files:     text files, JSON lines, folders, .gz or .zst of them: see `readers`.
        tokenizer: byte, the path of a tokenizer.json, or train:VOCAB to train a byte-level BPE on this text first.
        workers:   processes; default one per core that this process may use. The result is the same for any number.
        key:       the text's key in JSON lines.
        eod:       the tokenizer's end-of-document token, when it has none of the usual names.

    Raises:
        ValueError: the input, the tokenizer or the output is unusable; an older corpus of this name is then untouched.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"--workers {workers} must be at least 1")
    counts = Counts()
    inputs = list_files(files, counts)
    _check_output(output, inputs)
    job = _Job(inputs, tokenizer, output, _num_workers(inputs, workers), key, eod, counts)
    with tempfile.TemporaryDirectory() as scratch:
        return _write(job, _tokenizer_file(job, Path(scratch)))


def _check_output(output: str, inputs: list[Path]) -> None:
    """Refuse an output that would replace an input or a file that is not ours."""
    made = [Path(f"{output}{suffix}").resolve() for suffix in (".bin", ".idx", ".json", ".tokenizer.json")]
    if not Path(output).name or output.endswith("/"):
        raise ValueError(f"--output {output}: give a prefix such as data/corpus; .bin, .idx and .json are appended")
    clash = sorted({str(path) for path in inputs if path.resolve() in made})
    if clash:
        raise ValueError(f"--output {output} would replace the input {clash[0]}; choose another prefix")
    if sidecar_path(output).exists() and read_sidecar(output) is None:
        raise ValueError(f"--output {output} would replace {output}.json, which megalite did not write; choose another")
    check_output_folder(f"--output {output}", made[0].parent)


def _tokenizer_file(job: _Job, scratch: Path) -> Path | None:
    """The tokenizer.json to use, trained first for train:VOCAB; None for `byte`."""
    if not job.tokenizer.startswith("train:"):
        return resolve(job.tokenizer)
    vocab_size = trained_vocab(job.tokenizer)
    path = scratch / "tokenizer.json"
    path.write_text(train_bpe(read_documents(job.inputs, key=job.key, counts=Counts()), vocab_size), encoding="utf-8")
    return path


def _write(job: _Job, source: Path | None) -> Summary:
    tokenizer = load_tokenizer(source, eod=job.eod)
    eod_id = tokenizer.eod_id  # refused here, before any file is made
    texts = _Digest(read_documents(job.inputs, key=job.key, counts=job.counts))
    with IndexedWriter(job.output, token_dtype(tokenizer.vocab_size), vocab_size=tokenizer.vocab_size) as writer:
        encoded = _encoded(_batches(texts), tokenizer, source, job)
        for ids in _progress(encoded, writer, texts):
            writer.add_document(ids)
        if not writer.num_documents:
            raise ValueError(f"no text in {len(job.inputs)} files ({job.counts.empty} empty documents)")
        sidecar = Sidecar(
            tokenizer=job.tokenizer,
            tokenizer_sha256=file_sha256(source) if source else "",
            vocab_size=tokenizer.vocab_size,
            eod_id=eod_id,
            num_documents=writer.num_documents,
            num_tokens=writer.num_tokens,
            text_sha256=texts.hexdigest(),
            text_bytes=texts.num_bytes,
        )
        extra = {tokenizer_path(job.output): source.read_bytes()} if source else {}
        writer.finish({**extra, sidecar_path(job.output): to_json(sidecar).encode()})
    if source is None:
        tokenizer_path(job.output).unlink(missing_ok=True)  # of an older corpus of this name
    return Summary(job.output, sidecar, job.counts)


def _num_workers(inputs: list[Path], workers: int | None) -> int:
    if workers is not None:
        return workers
    small = sum(path.stat().st_size for path in inputs) < SERIAL_BYTES
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 1 if small else cores


def _batches(texts: _Digest) -> Iterator[list[str]]:
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@cache
def _worker_tokenizer(source: Path | None, eod: str | None) -> Tokenizer:
    """One tokenizer per worker process; the parent, which may prepare another corpus later, does not use it."""
    return load_tokenizer(source, eod=eod)


def _encode_in_worker(texts: list[str], *, source: Path | None, eod: str | None) -> list[np.ndarray]:
    return _encode(texts, _worker_tokenizer(source, eod))


def _encode(texts: list[str], tokenizer: Tokenizer) -> list[np.ndarray]:
    """The ids of each text, ended by the end-of-document id, in the corpus's type to be cheap to send."""
    dtype, end = token_dtype(tokenizer.vocab_size), [tokenizer.eod_id]
    return [np.concatenate([tokenizer.encode(text), end]).astype(dtype) for text in texts]


def _encoded(
    batches: Iterator[list[str]], tokenizer: Tokenizer, source: Path | None, job: _Job
) -> Iterator[list[np.ndarray]]:
    if job.workers == 1:
        yield from (_encode(batch, tokenizer) for batch in batches)
        return
    with multiprocessing.get_context("fork").Pool(job.workers) as pool:
        yield from pool.imap(partial(_encode_in_worker, source=source, eod=job.eod), batches)


def _progress(batches: Iterator[list[np.ndarray]], writer: IndexedWriter, texts: _Digest) -> Iterator[np.ndarray]:
    """Pass the documents on and show how far they are, on a terminal only."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("tokenizing", total=None)
        for batch in batches:
            yield from batch
            shown = f"{writer.num_documents:,} documents, {texts.num_bytes / 1e6:,.1f} MB, {writer.num_tokens:,} tokens"
            progress.update(task, description=shown)
