"""Runs of random numbers for consecutive global element indices."""

from torch import Tensor

from megalite.kernels.philox import reference
from megalite.kernels.philox.key import Key


def fill_normal(out: Tensor, key: Key, *, start: int, std: float, impl=reference) -> Tensor:
    """Fill contiguous `out` with normal(0, std) numbers of the elements start, start + 1, ...; returns `out`.

    Numerics: drawn in float64, then rounded once to out's dtype.
    """
    impl.fill_normal(out.view(-1), key, start=start, std=std)
    return out


def fill_keep(out: Tensor, key: Key, *, start: int, threshold: int, impl=reference) -> Tensor:
    """Fill contiguous bool `out` with `word 0 >= threshold` of the elements start, start + 1, ...; returns `out`."""
    impl.fill_keep(out.view(-1), key, start=start, threshold=threshold)
    return out
