"""Parts of a microbatch: who runs when, what a part is, and one rank's links with parts. Ranks: dist/test_begun.py."""

import pytest
import torch

from megalite.batch import Microbatch
from megalite.parallel.tp.begun import Steps, in_turns


def part(name: str, num_yields: int, events: list[str]) -> Steps:
    """A part that notes every turn."""
    for turn in range(num_yields):
        events.append(f"{name}{turn}")
        yield
    events.append(f"{name} ends")
    return torch.tensor(float(num_yields))


def turns_of(**num_yields: int) -> tuple[list[str], list[float]]:
    events: list[str] = []
    results = in_turns([part(name, num, events) for name, num in num_yields.items()])
    return events, [result.item() for result in results]


def test_every_part_gets_its_turn_before_any_gets_the_next():
    assert turns_of(a=2, b=2, c=2) == (
        ["a0", "b0", "c0", "a1", "b1", "c1", "a ends", "b ends", "c ends"],
        [2.0, 2.0, 2.0],
    )


def test_parts_of_different_length_end_in_their_own_time_and_results_keep_the_order_of_parts():
    events, results = turns_of(a=3, b=0, c=1)
    assert events == ["a0", "b ends", "c0", "a1", "c ends", "a2", "a ends"]
    assert results == [3.0, 0.0, 1.0]


def test_one_part_runs_through_and_none_is_nothing():
    assert turns_of(a=2) == (["a0", "a1", "a ends"], [2.0])
    assert in_turns([]) == []


def test_a_part_that_fails_is_heard():
    def failing() -> Steps:
        yield
        raise RuntimeError("the second turn")

    with pytest.raises(RuntimeError, match="the second turn"):
        in_turns([part("a", 3, []), failing()])


def make(B: int, *, documents: bool = True) -> Microbatch:
    tokens = torch.arange(B * 3).view(B, 3)
    return Microbatch(tokens, tokens + 1, tokens.int() if documents else None, sample_start=10, step=4)


@pytest.mark.parametrize("num", [1, 2, 3, 6])
def test_parts_are_the_sequences_in_order_with_their_place_in_the_global_batch(num):
    whole = make(6)
    parts = whole.parts(num)
    assert [p.sample_start for p in parts] == [10 + 6 // num * i for i in range(num)]
    assert all(p.step == 4 and p.rows == whole.rows // num for p in parts)
    for name in ("tokens", "labels", "documents"):
        assert torch.equal(torch.cat([getattr(p, name) for p in parts]), getattr(whole, name))


def test_parts_without_documents_have_none():
    assert [p.documents for p in make(4, documents=False).parts(2)] == [None, None]


@pytest.mark.parametrize("num", [4, 5])
def test_a_number_that_does_not_divide_is_refused(num):
    with pytest.raises(AssertionError, match=f"6 sequences do not divide by {num}"):
        make(6).parts(num)
