"""The simulator gives the published closed forms exactly, with and without the messages in the lists."""

from fractions import Fraction
from itertools import product

import pytest

from megalite.parallel.pp.actions import parse_rows
from megalite.parallel.pp.lower import Lowered, lower
from megalite.parallel.pp.schedules import Schedule, build_schedule, forward_only
from megalite.parallel.pp.simulate import simulate

EXACT = {"forward_s": Fraction(1), "backward_s": Fraction(2), "send_s": 0}


def lowered(schedule):
    return lower(schedule, zero_stage=0, reshard_after="step", reduce_each="step")


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "m"), list(product((1, 2, 3, 4, 8), (1, 2, 3, 7, 16))))
def test_bubble_of_gpipe_and_1f1b_is_p_minus_1_over_m(kind, pp, m):
    schedule = build_schedule(kind, pp=pp, virtual=1, num_microbatches=m)
    for timeline in (simulate(schedule, **EXACT), simulate(lowered(schedule), **EXACT)):
        assert timeline.overhead == Fraction(pp - 1, m)
        assert timeline.makespan_s == 3 * (m + pp - 1)
        assert timeline.total_bubble == Fraction(pp - 1, m + pp - 1)


@pytest.mark.parametrize(("pp", "virtual", "rounds"), list(product((1, 2, 4, 8), (1, 2, 3, 4), (1, 2, 4))))
def test_bubble_of_interleaved_shrinks_by_the_chunks(pp, virtual, rounds):
    m = pp * rounds
    schedule = build_schedule("interleaved", pp=pp, virtual=virtual, num_microbatches=m)
    for timeline in (simulate(schedule, **EXACT), simulate(lowered(schedule), **EXACT)):
        assert timeline.overhead == Fraction(pp - 1, virtual * m)


def test_forward_only_takes_m_plus_p_minus_1():
    schedule = forward_only("1f1b", pp=4, virtual=1, num_microbatches=5)
    assert simulate(schedule, **EXACT).makespan_s == 8


def test_messages_add_their_time_to_the_chain():
    """One microbatch has nothing to overlap with: p forwards, p backwards and 2(p-1) messages in a row."""
    schedule = build_schedule("1f1b", pp=4, virtual=1, num_microbatches=1)
    for play in (schedule, lowered(schedule)):
        assert simulate(play, forward_s=1, backward_s=2, send_s=Fraction(1, 2)).makespan_s == 4 * 3 + 6 * Fraction(1, 2)


def test_messages_of_a_pair_share_one_queue():
    """The second message starts when the first is through: it arrives at 1 + 3 + 3, not at 2 + 3."""
    schedule = forward_only("1f1b", pp=2, virtual=1, num_microbatches=2)
    timeline = simulate(lowered(schedule), forward_s=1, send_s=3)
    assert [span.start_s for span in timeline.spans[1]] == [4, 7]
    assert [span.start_s for span in simulate(schedule, forward_s=1, send_s=3).spans[1]] == [4, 5]


def test_costs_per_stage():
    """The slowest stage sets the pace: 4 microbatches of 5 + 7 on stage 1, after one forward of stage 0."""
    schedule = build_schedule("1f1b", pp=2, virtual=1, num_microbatches=4)
    timeline = simulate(schedule, forward_s=(1, 5), backward_s=(2, 7), send_s=0)
    assert timeline.busy_s(0) == 12
    assert timeline.busy_s(1) == 48
    assert timeline.makespan_s == 1 + 48 + 2
    assert timeline.spans[1][0].start_s == 1


def test_split_backwards_shorten_the_chain():
    """A weight gradient that nobody waits for fills the bubble: 2 ranks idle 2 of 20 instead of 6 of 24."""
    rows = parse_rows("0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2\n1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2\n")
    timeline = simulate(Schedule("zb", 2, 2, 3, (0, 1), rows), forward_s=1, input_s=1, weight_s=1, send_s=0)
    assert timeline.makespan_s == 10
    assert simulate(build_schedule("1f1b", pp=2, virtual=1, num_microbatches=3)).makespan_s == 12
    assert [timeline.bubble(rank) for rank in (0, 1)] == pytest.approx([0.1, 0.1])


def test_a_schedule_that_stops_is_an_error():
    rows = parse_rows("0F0,0RECV_B0,0B0\n1F0,1B0\n")
    schedule = Schedule("cut", 2, 2, 1, (0, 1), rows)
    with pytest.raises(ValueError, match="rank 0 never gets the input of 0B0"):
        simulate(Lowered(schedule, rows, 0, "step", "step"))
