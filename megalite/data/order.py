"""Which tokens sample i of a corpus holds: a pure function of (seed, corpus, split, epoch, index).

The documents of a split, in the epoch's order, form one stream of T tokens. Sample j is the seq_len + 1 tokens from
j * seq_len on, so neighbours share one token (the last label of one is the first input of the next) and an epoch has
(T - 1) // seq_len samples, which are then permuted. Nothing depends on the run's length, the mesh or the batch sizes,
so none of them changes what a step sees. All counts are int64.

Permutations sort raw Philox words: numpy keeps the words from version to version, but not `Generator.permutation`.
"""

import hashlib
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from megalite import native
from megalite.data.indexed import Indexed

SPLITS = ("train", "valid", "test")


def permutation(num: int, *key: object) -> np.ndarray:
    """(num,) int64: an order of range(num) that is drawn from the key alone."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=16).digest()
    words = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(num)
    return np.argsort(words, kind="stable")


def sample_index(lengths: np.ndarray, order: np.ndarray, seq_len: int) -> np.ndarray:
    """Where each sample of a stream begins.

    Args:
        lengths: (D,) tokens of each document.
        order:   (E,) documents in the order of the stream; together they must hold a sample, seq_len + 1 tokens.

    Returns:
        (n + 1, 2) int64: position in `order` and token offset in that document, of n samples and of the last one's end.
    """
    module = native.load()
    if module is None or lengths.max() >= 2**31:  # the compiled one takes lengths as Megatron stores them
        return sample_index_numpy(lengths, order, seq_len)
    return module.sample_index(lengths.astype(np.int32), order.astype(np.int64), seq_len)


def sample_index_numpy(lengths: np.ndarray, order: np.ndarray, seq_len: int) -> np.ndarray:
    """`sample_index` without the compiled module; the same numbers."""
    taken = lengths[order].astype(np.int64)
    ends = np.cumsum(taken)
    num_samples = (int(ends[-1]) - 1) // seq_len
    assert num_samples > 0, "a stream without a sample is refused when the corpus is opened"
    boundaries = np.arange(num_samples + 1, dtype=np.int64) * seq_len
    at = np.searchsorted(ends, boundaries, side="right")
    return np.stack([at, boundaries - (ends - taken)[at]], axis=1)


def split_pieces(corpus: Indexed, split: tuple[float, float, float], part: str) -> tuple[np.ndarray, np.ndarray]:
    """The documents of one part of a corpus as (starts, lengths) in tokens, both int64.

    Parts are cut between documents, at round(cumulative share * documents), as Megatron does. Where that rounding would
    leave a part without any document although its share is above 0 (few documents), the corpus is cut at
    round(cumulative share * tokens) instead, inside documents.

    Raises:
        ValueError: the shares are not numbers >= 0 with a positive sum.
    """
    if min(split) < 0 or not 0 < sum(split) < float("inf"):
        raise ValueError(f"data.split={list(split)} must be three numbers >= 0, not all 0, such as [969, 30, 1]")
    shares = np.cumsum([0.0, *split]) / sum(split)
    number = SPLITS.index(part)
    bounds = [round(float(share) * corpus.num_documents) for share in shares]
    if all(b > a for (a, b), share in zip(pairwise(bounds), split, strict=True) if share > 0):
        own = corpus.document_starts[bounds[number] : bounds[number + 1] + 1]
        return own[:-1], np.diff(own)
    first, last = (round(float(shares[n]) * corpus.num_tokens) for n in (number, number + 1))
    own = np.clip(corpus.document_starts, first, last)
    return own[:-1], np.diff(own)


@dataclass
class Stream:
    """One part of one corpus as an endless row of samples.

    `key` names the order (seed, corpus, split); an unshuffled stream takes documents and samples as they lie, in every
    epoch alike. The tables of the two latest epochs are kept, 24 bytes per sample and 8 per document each.
    """

    corpus: Indexed
    starts: np.ndarray
    lengths: np.ndarray
    seq_len: int
    key: tuple
    shuffle: bool
    samples_per_epoch: int = 0
    _epochs: dict = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.samples_per_epoch = max(int(self.lengths.sum()) - 1, 0) // self.seq_len

    def sample(self, index: int) -> np.ndarray:
        """(seq_len + 1,) int64 tokens of the sample with this number, counted over all epochs."""
        epoch, place = divmod(index, self.samples_per_epoch)
        order, boundaries, samples = self._epoch(epoch)
        position, offset = boundaries[place if samples is None else samples[place]].tolist()
        out, filled = np.empty(self.seq_len + 1, np.int64), 0
        while filled < len(out):
            document = order[position]
            start = self.starts[document] + offset
            count = min(int(self.lengths[document]) - offset, len(out) - filled)
            out[filled : filled + count] = self.corpus.tokens[start : start + count]
            filled, position, offset = filled + count, position + 1, 0
        return out

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        number = epoch if self.shuffle else 0
        if number not in self._epochs:
            if len(self._epochs) == 2:
                self._epochs.pop(next(iter(self._epochs)))
            self._epochs[number] = self._build(number)
        return self._epochs[number]

    def _build(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        count = len(self.lengths)
        order = permutation(count, *self.key, epoch, "documents") if self.shuffle else np.arange(count)
        boundaries = sample_index(self.lengths, order, self.seq_len)
        samples = permutation(self.samples_per_epoch, *self.key, epoch, "samples") if self.shuffle else None
        return order, boundaries, samples
