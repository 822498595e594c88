"""Cutting runs into boxes, and finding out whether boxes tile a tensor."""

import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.checkpoint.boxes import Box, coverage_fault, intersect, run_boxes


@st.composite
def runs(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    start = tuple(draw(st.integers(0, 3)) for _ in shape)
    numel = torch.Size(shape).numel()
    offset = draw(st.integers(0, numel))
    return Box(start, shape), offset, draw(st.integers(0, numel - offset))


@given(runs())
@settings(max_examples=200, deadline=None)
def test_boxes_are_the_run_in_order(run):
    box, offset, length = run
    index = torch.arange(box.numel).view(box.shape)
    cuts = run_boxes(box, offset, length)
    found = [index[sub.within(box)].reshape(-1) for _, sub in cuts]
    assert torch.equal(torch.cat([torch.empty(0, dtype=torch.int64), *found]), torch.arange(offset, offset + length))
    assert len(cuts) <= 2 * len(box.shape) - 1
    position = 0
    for at, sub in cuts:
        assert at == position
        position += sub.numel


def test_a_matrix_run_is_three_boxes():
    cuts = run_boxes(Box((10, 20), (5, 4)), 3, 11)
    assert [(at, str(box)) for at, box in cuts] == [(0, "[10:11, 23:24]"), (1, "[11:13, 20:24]"), (9, "[13:14, 20:22]")]


def test_intersect():
    assert intersect(Box((0, 0), (4, 4)), Box((2, 3), (4, 4))) == Box((2, 3), (2, 1))
    assert intersect(Box((0, 0), (4, 4)), Box((4, 0), (1, 4))) is None


@given(runs(), st.integers(1, 4), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_coverage_equals_counting(run, num_cuts, random):
    """A random tiling has no fault; after dropping, repeating or moving a box the verdict is that of counting."""
    shape = run[0].shape
    numel = torch.Size(shape).numel()
    ends = sorted({0, numel, *(random.randint(0, numel) for _ in range(num_cuts))})
    whole = Box((0,) * len(shape), shape)
    boxes = [b for lo, hi in pairwise(ends) for _, b in run_boxes(whole, lo, hi - lo)]
    assert coverage_fault(shape, boxes) is None
    changed = random.choices(boxes, k=random.randint(0, len(boxes) + 1))
    counts = torch.zeros(shape, dtype=torch.int64)
    for box in changed:
        counts[box.within(whole)] += 1
    assert (coverage_fault(shape, changed) is None) == bool((counts == 1).all())


@pytest.mark.parametrize(
    ("boxes", "text"),
    [
        ([Box((0, 0), (2, 3)), Box((2, 0), (1, 3))], r"element \[3, 0\] is missing"),
        ([Box((0, 0), (4, 3)), Box((1, 1), (1, 1))], r"element \[1, 1\] is stored 2 times"),
        ([Box((0, 0), (4, 2)), Box((0, 1), (4, 1))], r"element \[0, 1\] is stored 2 times"),
        ([Box((0, 0), (5, 3))], "leaves the shape"),
        ([Box((0, 0), (4, 3)), Box((0, 0), (0, 3))], "empty or negative"),
        ([], r"element \[0, 0\] is missing"),
    ],
)
def test_coverage_names_the_element(boxes, text):
    assert re.search(text, coverage_fault((4, 3), boxes))
