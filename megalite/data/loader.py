"""The loader: from a step's number to this data parallel rank's microbatches.

The global batch of step s (from 1) is the samples [(s-1)*G, s*G) of the blend. Data parallel rank r takes the G/dp of
them that begin at r*G/dp, and its microbatch mb the micro_batch_size that begin at mb*micro_batch_size within those.
The loader holds no position: resuming needs the step's number only, and dp, the micro batch size, the length of the run
and restarts never change which tokens a step sees. All ranks of one dp index (tp, pp) make the same microbatches.
"""

from dataclasses import dataclass

import numpy as np
import torch

from megalite.batch import IGNORE, Microbatch
from megalite.config.schema import Config
from megalite.data.blend import Blend
from megalite.data.corpus import Corpus, check_ids, end_of_document, open_corpora


@dataclass(frozen=True)
class Slice:
    """The part of each global batch that one data parallel rank takes, in sequences."""

    global_batch_size: int
    micro_batch_size: int
    dp_rank: int
    dp_size: int

    def starts(self) -> list[int]:
        """Index within the global batch of each microbatch's first sequence."""
        per_rank = self.global_batch_size // self.dp_size
        first = self.dp_rank * per_rank
        return list(range(first, first + per_rank, self.micro_batch_size))


@dataclass(frozen=True)
class Loader:
    """Makes microbatches of one split; see `build_loader`. `eod` is None when the corpora have no known one."""

    corpora: list[Corpus]
    blend: Blend
    slice: Slice
    vocab_size: int
    eod: int | None
    document_mask: bool
    mask_eod_loss: bool

    def microbatches(self, step: int) -> list[Microbatch]:
        """This rank's microbatches of one global batch.

        Args:
            step: from 1. An evaluation asks the validation loader for steps 1 to run.eval_batches, each time the same.
        """
        if step < 1:
            raise ValueError(f"step={step}: steps count from 1")
        return [self._microbatch(step, start) for start in self.slice.starts()]

    def sample(self, index: int) -> np.ndarray:
        """(seq_len + 1,) int64: sample `index` of the blend, counted over all epochs."""
        which, number = self.blend[index]
        tokens = self.corpora[which].stream.sample(number)
        check_ids(tokens, self.vocab_size, self.corpora[which].path)
        return tokens

    @property
    def samples_per_epoch(self) -> int:
        """Samples until the first corpus begins to repeat."""
        shares = zip(self.corpora, self.blend.weights, strict=True)
        return int(min(c.stream.samples_per_epoch / share for c, share in shares))

    def describe(self) -> str:
        """One line per corpus: its size, its samples per epoch and its share."""
        return "\n".join(
            f"{c.path}: {c.indexed.num_documents:,} documents, {c.indexed.num_tokens:,} tokens; "
            f"{c.stream.key[2]} part {int(c.stream.lengths.sum()):,} tokens, {c.stream.samples_per_epoch:,} samples "
            f"of {c.stream.seq_len} per epoch, weight {share:.4g}"
            + (f"; text sha256 {c.sidecar.text_sha256[:16]}, {c.sidecar.text_bytes:,} bytes" if c.sidecar else "")
            for c, share in zip(self.corpora, self.blend.weights, strict=True)
        )

    def _microbatch(self, step: int, start: int) -> Microbatch:
        first = (step - 1) * self.slice.global_batch_size + start
        rows = np.stack([self.sample(first + b) for b in range(self.slice.micro_batch_size)])
        tokens, labels = rows[:, :-1], rows[:, 1:].copy()
        ends = tokens == self.eod if self.eod is not None else np.zeros(tokens.shape, bool)
        if self.mask_eod_loss:
            labels[ends] = IGNORE
        documents = None
        if self.document_mask:  # the end-of-document token belongs to the document that it ends
            documents = torch.from_numpy((np.cumsum(ends, axis=1) - ends).astype(np.int32))
        tokens = torch.from_numpy(tokens.copy())
        return Microbatch(tokens, torch.from_numpy(labels), documents, sample_start=start, step=step)


def build_loader(config: Config, split: str, *, dp_rank: int, dp_size: int, cache_dir: str = "data") -> Loader:
    """Open the corpora of data.train and make the loader of one split for one data parallel rank.

    The train split is shuffled anew in every epoch; valid and test keep the order of the corpus, in every evaluation
    alike, and begin again when run.eval_batches asks for more than they hold.

    Args:
        split:     train, valid or test.
        cache_dir: where builtin corpora are kept, relative to the working directory.

    Raises:
        ValueError: whatever is wrong with the data, see `corpus`; or dp * micro batch does not divide the global batch.

    Communication: none; every rank builds its own index.
    """
    batch = config.batch
    if batch.global_batch_size % (batch.micro_batch_size * dp_size):
        raise ValueError(
            f"batch.global_batch_size={batch.global_batch_size} is not a multiple of micro_batch_size "
            f"{batch.micro_batch_size} x dp {dp_size} = {batch.micro_batch_size * dp_size}"
        )
    corpora = open_corpora(config, split, cache_dir=cache_dir)
    blend = Blend([source.weight for source in config.data.train])
    blend.reserve(batch.global_batch_size * (config.run.steps if split == "train" else config.run.eval_batches))
    return Loader(
        corpora=corpora,
        blend=blend,
        slice=Slice(batch.global_batch_size, batch.micro_batch_size, dp_rank, dp_size),
        vocab_size=config.model.vocab_size,
        eod=end_of_document(config, corpora),
        document_mask=config.data.document_mask,
        mask_eod_loss=config.data.mask_eod_loss,
    )
