"""The simulator gives the published closed forms exactly, with and without the messages in the lists."""

from fractions import Fraction
from itertools import product

import pytest

from megalite.parallel.pp.actions import parse_rows
from megalite.parallel.pp.lower import Lowered, lower
from megalite.parallel.pp.schedule import Schedule
from megalite.parallel.pp.schedules import build_schedule, forward_only
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


UNITS = {"forward_s": 1, "input_s": 1, "weight_s": 1, "backward_s": 2, "send_s": 0}
"""Zero-bubble schedules are made for F, I and W of the same length."""


def played(kind, pp, m, virtual, **costs):
    """The timelines of a schedule and of its lowered lists, which must be the same."""
    schedule = build_schedule(kind, pp=pp, virtual=virtual, num_microbatches=m)
    timeline = simulate(schedule, **(UNITS | costs))
    assert simulate(lowered(schedule), **(UNITS | costs)) == timeline
    return timeline


@pytest.mark.parametrize(("pp", "more"), list(product((1, 2, 3, 5, 8), (0, 1, 9))))
def test_bubble_of_zb1p_is_a_third_of_that_of_1f1b(pp, more):
    """(pp - 1) (F + I - W), from pp microbatches on: arXiv:2401.10241, table 1."""
    m = pp + more
    timeline = played("zb_h1", pp, m, 1)
    assert timeline.makespan_s == timeline.longest_rank_s == 3 * m + (pp - 1)
    assert timeline.overhead == pytest.approx((pp - 1) / (3 * m), rel=1e-12)
    assert timeline.makespan_s - 3 * m == (played("1f1b", pp, m, 1).makespan_s - 3 * m) / 3


@pytest.mark.parametrize(("pp", "more"), list(product((1, 2, 3, 5, 8), (0, 1, 9))))
def test_zb2p_and_zbv_leave_no_bubble_within_a_rank(pp, more):
    """(pp - 1) (F + I - 2 W) = 0, from 2 pp - 1 microbatches on; only the shift of the ranks' starts is left."""
    m = 2 * pp - 1 + more
    for kind, virtual in (("zb_h2", 1), ("zbv", 2)):
        timeline = played(kind, pp, m, virtual)
        assert timeline.longest_rank_s == 3 * m * virtual, kind
        assert timeline.makespan_s == 3 * m * virtual + (pp - 1), kind
        assert [row[0].start_s for row in timeline.spans] == list(range(pp)), kind


@pytest.mark.parametrize(("pp", "rounds"), list(product((1, 2, 3, 4, 5, 8), (2, 3, 4))))
def test_bubbles_of_the_other_v_shapes(pp, rounds):
    """DualPipeV: pp - 1 units of a chunk. V-Half: little more than half of the 6 (pp - 1) of 1F1B."""
    m = rounds * pp
    assert played("dualpipe_v", pp, m, 2).makespan_s == 6 * m + (pp - 1)
    bubble = played("v_half", pp, m, 2).makespan_s - 6 * m
    assert bubble == {1: 0, 2: 3}.get(pp, (7 * pp - 9) // 2)
    assert bubble <= 0.55 * 6 * (pp - 1)


def test_unequal_costs_of_zb_h1_follow_the_published_formula():
    """(pp - 1) (F + I - W) also holds for other lengths, as long as W is the shortest."""
    timeline = played("zb_h1", 4, 12, 1, forward_s=5, input_s=5, weight_s=4, backward_s=9)
    assert timeline.makespan_s == 12 * (5 + 5 + 4) + 3 * (5 + 5 - 4)


PROFILES = {
    "1.5B": (8, 3, (18.522, 18.086, 9.337, 0.601)),
    "6.2B": (8, 4, (29.718, 29.444, 19.927, 0.527)),
    "14.6B": (16, 3, (11.347, 11.248, 8.132, 0.377)),
    "28.3B": (32, 2, (10.419, 10.207, 7.715, 0.408)),
}
"""Model -> pp, chunks of a layer per rank, and the profiled F, I, W and message in ms."""
PUBLISHED = {
    "1.5B": {
        "1F1B": {24: 0.2431, 32: 0.1985, 64: 0.124},
        "1F1B-I": {24: 0.1055, 32: 0.0818, 64: 0.0443},
        "ZB-1p": {24: 0.1585, 32: 0.1242, 64: 0.0674},
        "ZB-2p": {24: 0.0433, 32: 0.0039, 64: 0.0026},
    },
    "6.2B": {
        "1F1B": {24: 0.2347, 32: 0.1898, 64: 0.1091},
        "1F1B-I": {24: 0.0808, 32: 0.0628, 64: 0.032},
        "ZB-1p": {24: 0.1323, 32: 0.1045, 64: 0.0554},
        "ZB-2p": {24: 0.0029, 32: 0.0022, 64: 0.001},
    },
    "14.6B": {
        "1F1B": {48: 0.2552, 64: 0.2082, 128: 0.1251},
        "1F1B-I": {48: 0.1104, 64: 0.0852, 128: 0.0445},
        "ZB-1p": {48: 0.1397, 64: 0.1088, 128: 0.0576},
        "ZB-2p": {48: 0.0066, 64: 0.0054, 128: 0.0028},
    },
    "28.3B": {
        "1F1B": {96: 0.2646, 128: 0.2168, 256: 0.1352},
        "1F1B-I": {96: 0.1493, 128: 0.1164, 256: 0.0624},
        "ZB-1p": {96: 0.1421, 128: 0.1106, 256: 0.0594},
        "ZB-2p": {96: 0.0038, 128: 0.0029, 256: 0.0018},
    },
}
"""Model -> schedule -> microbatches -> bubble: arXiv:2401.10241 (ICLR 2024), table 5, computed from the profiles."""


def published_kind(name, pp, virtual, m, costs):
    """The schedule that the paper calls `name`, and its chunks per rank."""
    kinds = {"1F1B": ("1f1b", 1), "1F1B-I": ("interleaved", virtual), "ZB-1p": ("zb_h1", 1), "ZB-2p": ("zb_h2", 1)}
    kind, chunks = kinds[name]
    return build_schedule(kind, pp=pp, virtual=chunks, num_microbatches=m, costs=costs), chunks


@pytest.mark.parametrize("name", ["1F1B", "1F1B-I", "ZB-1p", "ZB-2p"])
@pytest.mark.parametrize("model", PROFILES)
def test_bubbles_are_the_published_ones_within_a_point(model, name):
    pp, virtual, (forward, input_grad, weight_grad, send) = PROFILES[model]
    for m, published in PUBLISHED[model][name].items():
        schedule, chunks = published_kind(name, pp, virtual, m, PROFILES[model][2])
        parts = [part / chunks for part in (forward, input_grad + weight_grad, input_grad, weight_grad)]
        lengths = dict(zip(("forward_s", "backward_s", "input_s", "weight_s"), parts, strict=True))
        longest_s = simulate(schedule, **lengths, send_s=send).longest_rank_s
        bubble = 1 - m * (forward + input_grad + weight_grad) / longest_s
        assert bubble == pytest.approx(published, abs=0.01), m


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
