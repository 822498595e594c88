"""Tokenizers: text to ids and back, each with an end-of-document id that is checked before anything is written.

`byte` needs nothing: ids 0 to 255 are UTF-8 bytes, 256 ends a document. All others are Hugging Face tokenizer.json
files, used without special tokens: a document that contains the text `<|endoftext|>` gets its characters, not the id.
"""

import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")
MIN_TRAINED_VOCAB = 257


class Tokenizer(Protocol):
    """What preparing and inspecting a corpus need."""

    vocab_size: int
    eod_id: int

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, without the end-of-document id."""

    def decode(self, ids: np.ndarray) -> str:
        """Text of ids; the end-of-document id becomes `<eod>` or the tokenizer's own name for it."""


class ByteTokenizer:
    """UTF-8 bytes and one end-of-document id."""

    vocab_size = 257
    eod_id = 256

    def encode(self, text: str) -> np.ndarray:
        """One id per byte."""
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, ids: np.ndarray) -> str:
        """Bytes that are not UTF-8, as where a document is cut, become U+FFFD."""
        ids = np.asarray(ids)
        pieces = np.split(ids, np.flatnonzero(ids == self.eod_id))
        return "<eod>".join(bytes(p[p != self.eod_id].astype(np.uint8)).decode(errors="replace") for p in pieces)


class JsonTokenizer:
    """A Hugging Face tokenizer.json; `eod` names its end-of-document token when it is none of the usual names."""

    def __init__(self, path: Path, *, eod: str | None = None) -> None:
        try:
            self._tokenizer = HfTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every kind of bad file
            raise ValueError(f"{path}: not a tokenizer.json that this tokenizers library reads: {error}") from None
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self._path, self._eod = path, eod
        self.vocab_size = max(self._vocab.values()) + 1

    @cached_property
    def eod_id(self) -> int:
        """The end-of-document id; looked up on demand, since decoding needs none."""
        return self._vocab[_eod_name(self._path, self._vocab, self._eod)]

    def encode(self, text: str) -> np.ndarray:
        """Ids without special tokens."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int64)

    def decode(self, ids: np.ndarray) -> str:
        """Text, special tokens spelled out."""
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)


def _eod_name(path: Path, vocab: dict[str, int], eod: str | None) -> str:
    if eod is not None:
        if eod not in vocab:
            raise ValueError(f"--eod {eod}: {path} has no such token; name one of its {len(vocab)} tokens")
        return eod
    names = [*_configured_eos(path.with_name("tokenizer_config.json")), *EOD_NAMES]
    found = next((name for name in names if name in vocab), None)
    if found is None:
        raise ValueError(
            f"{path} has no end-of-document token ({', '.join(EOD_NAMES)}); name another of its tokens with --eod "
            f"TOKEN, or add one to the tokenizer"
        )
    return found


def _configured_eos(path: Path) -> list[str]:
    """The eos_token of the tokenizer_config.json that lies beside a tokenizer.json, if there is one."""
    if not path.is_file():
        return []
    eos = json.loads(path.read_text()).get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    return [eos] if isinstance(eos, str) else []


def resolve(name: str) -> Path | None:
    """The tokenizer.json that a name on the command line means; None for `byte`.

    Raises:
        ValueError: it is neither `byte` nor a tokenizer.json nor a folder that holds one.
    """
    if name == "byte":
        return None
    path = Path(name)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"--tokenizer {name}: no such file; use byte, train:VOCAB, or the path of a tokenizer.json")
    return path


def load_tokenizer(path: Path | None, *, eod: str | None = None) -> Tokenizer:
    """The tokenizer of a tokenizer.json, or `byte` for None."""
    if path is not None:
        return JsonTokenizer(path, eod=eod)
    if eod is not None:
        raise ValueError(f"--eod {eod}: the byte tokenizer has its own end-of-document id, 256; leave --eod out")
    return ByteTokenizer()


def trained_vocab(name: str) -> int:
    """VOCAB of `train:VOCAB`."""
    text = name.removeprefix("train:")
    if not text.isdecimal() or int(text) < MIN_TRAINED_VOCAB:
        raise ValueError(
            f"--tokenizer {name}: the vocabulary must be a number of at least {MIN_TRAINED_VOCAB} (256 bytes and the "
            f"end-of-document token), such as train:4096"
        )
    return int(text)


def train_bpe(texts: Iterable[str], vocab_size: int) -> str:
    """Train a byte-level BPE and return its tokenizer.json text; a small text may yield fewer merges than asked for."""
    tokenizer = HfTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD_NAMES[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=True)
