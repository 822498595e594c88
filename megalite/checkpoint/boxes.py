"""Boxes: axis-aligned regions of a logical tensor. Pure integer arithmetic, no data.

A shard of a flat buffer is a run of elements of some box in row-major order; cut into boxes it no longer depends on how
it was sharded, so any layout can read any other's. Invariant: the boxes of `run_boxes` are disjoint, each is one
contiguous part of the run, and together they are the run.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from math import prod


@dataclass(frozen=True)
class Box:
    """Elements start[d] <= index[d] < start[d] + shape[d] of a tensor."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """One past the last index of each dim."""
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """This box as slices of a tensor that holds `outer`."""
        return tuple(slice(a - o, a - o + n) for a, o, n in zip(self.start, outer.start, self.shape, strict=True))

    def __str__(self) -> str:
        """As a subscript: [0:4, 8:16]."""
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


def intersect(a: Box, b: Box) -> Box | None:
    """The elements that two boxes share, or None when there are none."""
    start = tuple(map(max, a.start, b.start))
    shape = tuple(min(p, q) - s for p, q, s in zip(a.stop, b.stop, start, strict=True))
    return Box(start, shape) if all(n > 0 for n in shape) else None


def run_boxes(box: Box, offset: int, length: int) -> list[tuple[int, Box]]:
    """Cut elements [offset, offset + length) of `box`, counted in row-major order, into boxes.

    Returns (position of the box's first element within the run, box) in order: at most 2 * ndim - 1 boxes.
    """
    assert 0 <= offset <= box.numel - length, f"run {offset}+{length} leaves {box}"
    if length == 0:
        return []
    if len(box.shape) == 1:
        return [(0, Box((box.start[0] + offset,), (length,)))]
    row = prod(box.shape[1:])
    inner = Box(box.start[1:], box.shape[1:])
    cuts: list[tuple[int, Box]] = []
    done = 0
    while done < length:
        index, within = divmod(offset + done, row)
        whole = (length - done) // row if within == 0 else 0
        at = box.start[0] + index
        if whole:
            cuts.append((done, Box((at, *inner.start), (whole, *inner.shape))))
            done += whole * row
            continue
        part = min(row - within, length - done)
        cuts += [
            (done + position, Box((at, *sub.start), (1, *sub.shape)))
            for position, sub in run_boxes(inner, within, part)
        ]
        done += part
    return cuts


def coverage_fault(shape: tuple[int, ...], boxes: Iterable[Box]) -> str | None:
    """Say where `boxes` fail to cover a tensor of `shape` exactly once, or None when they do.

    [Note: coverage by corners] The n-dimensional difference of a box's indicator is +-1 at its 2^n corners and 0
    elsewhere, and differencing loses nothing for functions of finite support. So the boxes tile the tensor if and only
    if their signed corners sum to those of the whole tensor. At the first index (lexicographically) where the sums
    differ, the difference is how many times too often that element is covered.
    """
    whole = Box((0,) * len(shape), tuple(shape))
    sums: Counter = Counter()
    for box in boxes:
        if any(n <= 0 for n in box.shape) or any(a < 0 for a in box.start):
            return f"box {box} is empty or negative"
        if any(b > n for b, n in zip(box.stop, shape, strict=True)):
            return f"box {box} leaves the shape {tuple(shape)}"
        _add_corners(sums, box, 1)
    if whole.numel:
        _add_corners(sums, whole, -1)
    bad = min((corner for corner, count in sums.items() if count), default=None)
    if bad is None:
        return None
    many = sums[bad] + 1
    return f"element {list(bad)} is stored {many} times" if many > 1 else f"element {list(bad)} is missing"


def _add_corners(sums: Counter, box: Box, sign: int) -> None:
    for ends in product((0, 1), repeat=len(box.shape)):
        corner = tuple(a + n if end else a for a, n, end in zip(box.start, box.shape, ends, strict=True))
        sums[corner] += sign * (-1) ** sum(ends)
