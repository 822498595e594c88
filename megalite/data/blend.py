"""Which corpus a sample comes from when several are blended: Megatron's greedy rule.

Sample k goes to the corpus that is furthest behind its share, argmax_i (w_i * max(k, 1) - count_i), the lowest index on
ties. The first n choices do not depend on how many follow, so a longer run keeps them. No corpus is ever a whole sample
ahead of its share; even one with a tiny weight is drawn early, once. A corpus that is used up starts its next epoch.
"""

import numpy as np

from megalite import native


def blend_index(weights: np.ndarray, num: int) -> tuple[np.ndarray, np.ndarray]:
    """(num,) int16 corpus and (num,) int64 sample within that corpus. `weights` are float64 and sum to 1."""
    module = native.load()
    return blend_index_python(weights, num) if module is None else module.blend_index(weights, num)


def blend_index_python(weights: np.ndarray, num: int) -> tuple[np.ndarray, np.ndarray]:
    """`blend_index` without the compiled module; the same numbers."""
    shares = [float(w) for w in weights]
    counts = [0] * len(shares)
    which, sample = np.empty(num, np.int16), np.empty(num, np.int64)
    for k in range(num):
        behind = [w * max(k, 1) - c for w, c in zip(shares, counts, strict=True)]
        chosen = behind.index(max(behind))
        which[k], sample[k] = chosen, counts[chosen]
        counts[chosen] += 1
    return which, sample


class Blend:
    """The choices of one blend, made as far as they are asked for."""

    def __init__(self, weights: list[float]) -> None:
        total = np.asarray(weights, np.float64)
        self.weights = total / total.sum()
        self._which, self._sample = np.empty(0, np.int16), np.empty(0, np.int64)

    def __getitem__(self, index: int) -> tuple[int, int]:
        """Corpus and sample number within it (over all its epochs) of sample `index`."""
        if len(self.weights) == 1:
            return 0, index
        if index >= len(self._which):
            self.reserve(max(2 * index, 1024))
        return int(self._which[index]), int(self._sample[index])

    def reserve(self, num: int) -> None:
        """Make the first `num` choices at once."""
        if len(self.weights) > 1 and num > len(self._which):
            self._which, self._sample = blend_index(self.weights, num)
