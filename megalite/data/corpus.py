"""A corpus as training needs it: opened, checked against the model, cut into a split.

Everything that can be wrong with the data is found here, before the first step, by every rank for itself and without a
collective.
"""

from dataclasses import dataclass

import numpy as np

from megalite.config.schema import Config
from megalite.data.builtin import BUILTIN, builtin_prefix
from megalite.data.indexed import Indexed, open_indexed
from megalite.data.order import SPLITS, Stream, split_pieces
from megalite.data.sidecar import Sidecar, read_sidecar

SCAN_TOKENS = 2**27
"""Corpora of unknown vocabulary are read up to here for their largest id; later ids are checked as they are used."""


@dataclass(frozen=True)
class Corpus:
    """One source of the blend: what is open, what is known of it, and its samples in the wanted split."""

    path: str
    indexed: Indexed
    sidecar: Sidecar | None
    stream: Stream


def open_corpora(config: Config, split: str, *, cache_dir: str) -> list[Corpus]:
    """Open and check every corpus of data.train for one split.

    Raises:
        ValueError: no corpus, a damaged one, one that does not fit the model, or a split too small for one sequence.
    """
    if not config.data.train:
        raise ValueError("data.train is empty; name a corpus: data.train=[{path: builtin:docs}] or a prepared PREFIX")
    if config.data.split[SPLITS.index(split)] == 0:
        raise ValueError(f"data.split={list(config.data.split)} leaves no {split} data; give that part a share above 0")
    corpora = [_open(config, split, number, cache_dir) for number in range(len(config.data.train))]
    _check_one_tokenizer(corpora)
    return corpora


def _open(config: Config, split: str, number: int, cache_dir: str) -> Corpus:
    path = config.data.train[number].path
    prefix = builtin_prefix(path, cache_dir=cache_dir) if path.startswith(BUILTIN) else path
    indexed, sidecar = open_indexed(prefix), read_sidecar(prefix)
    _check_vocab(config.model.vocab_size, path, indexed, sidecar)
    starts, lengths = split_pieces(indexed, config.data.split, split)
    key = (config.data.seed, number, split)
    stream = Stream(indexed, starts, lengths, config.batch.seq_len, key=key, shuffle=split == "train")
    if stream.samples_per_epoch == 0:
        raise ValueError(
            f"batch.seq_len={config.batch.seq_len} needs {config.batch.seq_len + 1} tokens, but the {split} part of "
            f"{path} has {int(lengths.sum())} of its {indexed.num_tokens}; use a shorter batch.seq_len or give that "
            f"part a larger share than data.split={list(config.data.split)}"
        )
    return Corpus(path, indexed, sidecar, stream)


def _check_vocab(vocab_size: int, path: str, indexed: Indexed, sidecar: Sidecar | None) -> None:
    if sidecar is not None:
        if sidecar.num_tokens != indexed.num_tokens or sidecar.num_documents != indexed.num_documents:
            raise ValueError(
                f"{indexed.prefix}.json describes {sidecar.num_documents} documents of {sidecar.num_tokens} tokens, "
                f"but the .idx has {indexed.num_documents} of {indexed.num_tokens}; the files are not of one corpus: "
                f"prepare it again"
            )
        needed, source = sidecar.vocab_size, f"tokenizer {sidecar.tokenizer}"
    else:
        part = indexed.tokens[:SCAN_TOKENS]
        if part.min() < 0:
            raise ValueError(f"{indexed.prefix}.bin holds the negative id {int(part.min())}; it is not a token corpus")
        needed, source = int(part.max()) + 1, f"largest token id {int(part.max())}"
    if needed > vocab_size:
        raise ValueError(f"model.vocab_size={vocab_size} is less than the {needed} of {path} ({source}); use {needed}")


def _check_one_tokenizer(corpora: list[Corpus]) -> None:
    known = {(c.sidecar.tokenizer_sha256 or c.sidecar.tokenizer): c for c in corpora if c.sidecar}
    if len(known) > 1:
        (_, a), (_, b) = list(known.items())[:2]
        raise ValueError(
            f"data.train blends {a.path} (tokenizer {a.sidecar.tokenizer}) with {b.path} (tokenizer "
            f"{b.sidecar.tokenizer}); the same id means different text in each: prepare both with one tokenizer"
        )


def end_of_document(config: Config, corpora: list[Corpus]) -> int | None:
    """The end-of-document id: data.eod_id, or what the corpora record; None when nobody needs it and nobody knows it.

    Raises:
        ValueError: it is needed and unknown, the corpora record different ones, or it is not in the vocabulary.
    """
    data = config.data
    recorded = {c.sidecar.eod_id for c in corpora if c.sidecar}
    eod = data.eod_id if data.eod_id is not None else next(iter(recorded), None)
    needing = [name for name in ("document_mask", "mask_eod_loss") if getattr(data, name)]
    if needing and data.eod_id is None:
        unknown = [c.path for c in corpora if c.sidecar is None]
        if unknown or len(recorded) > 1:
            why = f"{unknown[0]} records none" if unknown else f"the corpora record {sorted(recorded)}"
            raise ValueError(f"data.{needing[0]}=true needs the end-of-document id and {why}; set data.eod_id")
    if eod is not None and eod >= config.model.vocab_size:
        raise ValueError(f"data.eod_id={eod} is not below model.vocab_size={config.model.vocab_size}")
    return eod


def check_ids(tokens: np.ndarray, vocab_size: int, path: str) -> None:
    """Refuse a sample with an id outside the vocabulary: behind the part that was scanned at the start."""
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        bad = int(tokens[(tokens < 0) | (tokens >= vocab_size)][0])
        raise ValueError(f"{path} holds the token id {bad}, which is not below model.vocab_size={vocab_size}")
