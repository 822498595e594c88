"""One microbatch as every stage of the pipeline sees it. Plain data: no model, no mesh."""

from dataclasses import dataclass, replace

from torch import Tensor

IGNORE = -100
"""Label of a position that is not trained on."""


@dataclass(frozen=True)
class Microbatch:
    """The sequences that one rank moves through the model at once.

    tokens:       (B, S) int64.
    labels:       (B, S) int64, the next token, IGNORE where nothing is trained.
    documents:    (B, S) int32, the index of each token's document within its sequence, or None without document masks.
    sample_start: index of the first sequence within the *global* batch: dropout is keyed by it, not by the rank.
    step:         the optimizer step, for dropout. Evaluation does not drop.
    """

    tokens: Tensor
    labels: Tensor
    documents: Tensor | None = None
    sample_start: int = 0
    step: int = 0

    def parts(self, num: int) -> list["Microbatch"]:
        """Its sequences in `num` runs of equal length; dropout goes on drawing what it would for the whole."""
        size = len(self.tokens) // num
        assert size * num == len(self.tokens), f"{len(self.tokens)} sequences do not divide by {num}"
        return [self._from(start, start + size) for start in range(0, len(self.tokens), size)]

    def _from(self, start: int, end: int) -> "Microbatch":
        return replace(
            self,
            tokens=self.tokens[start:end],
            labels=self.labels[start:end],
            documents=None if self.documents is None else self.documents[start:end],
            sample_start=self.sample_start + start,
        )

    @property
    def rows(self) -> int:
        """M = B * S."""
        return self.tokens.numel()
