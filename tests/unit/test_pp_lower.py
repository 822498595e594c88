"""Lowering: every size passes the proof on both machines, and gathers and reductions are exactly the promised ones."""

from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config.pipeline import SCHEDULES
from megalite.parallel.pp.actions import COMPUTE, MESSAGES, Op, parse_rows, partner
from megalite.parallel.pp.check import check
from megalite.parallel.pp.lower import computes_of, lower
from megalite.parallel.pp.schedule import Schedule
from megalite.parallel.pp.schedules import build_schedule, forward_only

POLICIES = ("forward", "microbatch", "step")


@st.composite
def schedules(draw):
    """Every kind, training and evaluation, pp <= 8, virtual <= 4, at most 32 microbatches."""
    kind, pp = draw(st.sampled_from(sorted(SCHEDULES))), draw(st.integers(1, 8))
    virtual = SCHEDULES[kind].virtual or draw(st.integers(1, 4))
    if pp == 1 and kind in ("gpipe", "1f1b"):
        virtual = draw(st.integers(1, 4))
    if draw(st.integers(0, 3)) == 0:
        return forward_only(kind, pp=pp, virtual=virtual, num_microbatches=draw(st.integers(1, 12)))
    num = pp * draw(st.integers(1, 32 // pp)) if SCHEDULES[kind].rounds else draw(st.integers(1, 32))
    return build_schedule(kind, pp=pp, virtual=virtual, num_microbatches=num)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(schedules(), st.sampled_from((0, 1, 2, 3)), st.sampled_from(POLICIES), st.sampled_from(("microbatch", "step")))
def test_every_schedule_passes_the_proof(schedule, zero_stage, reshard_after, reduce_each):
    lowered = lower(schedule, zero_stage=zero_stage, reshard_after=reshard_after, reduce_each=reduce_each)
    assert check(lowered) == check(lowered, blocking=False)
    assert computes_of(lowered.actions) == schedule.actions


@pytest.mark.parametrize("kind", sorted(kind for kind in SCHEDULES if kind != "interleaved"))
def test_few_microbatches_pass_the_proof_on_every_number_of_ranks(kind):
    """Where the warm-up and the cool-down of a schedule meet, its phases are cut short."""
    for pp in range(1, 9):
        for m in range(1, 2 * pp + 2, 1 if pp < 5 else 3):
            schedule = build_schedule(kind, pp=pp, virtual=SCHEDULES[kind].virtual, num_microbatches=m)
            check(lower(schedule, zero_stage=0, reshard_after="step", reduce_each="step"))


@pytest.mark.parametrize(("kind", "virtual"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb_h2", 1)])
def test_messages_of_a_pair_stand_in_one_order_on_both_ranks(kind, virtual):
    """At pp = 2 all messages run between the same two ranks, so the two lists must mirror each other."""
    schedule = build_schedule(kind, pp=2, virtual=virtual, num_microbatches=6)
    rows = lower(schedule, zero_stage=0, reshard_after="step", reduce_each="step").actions
    one, two = ([action for action in row if action.op in MESSAGES] for row in rows)
    assert one == [partner(action) for action in two]
    assert len(one) == 2 * (2 * virtual - 1) * 6


def test_a_receive_is_posted_while_the_receiver_still_has_work():
    row = lower(
        build_schedule("1f1b", pp=2, virtual=1, num_microbatches=4),
        zero_stage=0, reshard_after="step", reduce_each="step",
    ).actions[1]  # fmt: skip
    assert [str(action) for action in row[:4]] == ["1RECV_F0", "1RECV_F1", "1F0", "1B0"]


def gathers_without_prefetch(row, reshard_after):
    """Gathers of one rank and the most stages held at once, if each gather came right before its first use."""
    if reshard_after == "forward":
        turns = sum(a.op is Op.F and b.op is not Op.F and a.stage == b.stage for a, b in pairwise(row))
        return len(row) - turns, 1
    if reshard_after == "step":
        return len({action.stage for action in row}), most_open((a.stage, a.op) for a in row)
    flying, gathers, peak = {}, 0, 0
    for action in row:
        before = flying.get(action.stage, 0)
        gathers += action.op is Op.F and before == 0
        peak = max(peak, sum(count > 0 for stage, count in flying.items() if stage != action.stage) + 1)
        flying[action.stage] = before + (1 if action.op is Op.F else -1)
    return gathers, peak


def most_open(uses):
    """Most stages between their first and last use at once."""
    uses = [stage for stage, _ in uses]
    spans = [(uses.index(stage), len(uses) - 1 - uses[::-1].index(stage)) for stage in set(uses)]
    return max(sum(first <= index <= last for first, last in spans) for index in range(len(uses)))


@pytest.mark.parametrize("reshard_after", POLICIES)
@pytest.mark.parametrize(
    ("kind", "pp", "virtual", "m"),
    [("gpipe", 2, 1, 3), ("1f1b", 1, 4, 3), ("1f1b", 4, 1, 6), ("interleaved", 2, 3, 4), ("interleaved", 4, 2, 8)],
)
def test_gathers_follow_the_policy_and_prefetch_holds_one_more(kind, pp, virtual, m, reshard_after):
    schedule = build_schedule(kind, pp=pp, virtual=virtual, num_microbatches=m)
    report = check(lower(schedule, zero_stage=3, reshard_after=reshard_after, reduce_each="step"))
    for rank, row in enumerate(schedule.actions):
        gathers, peak = gathers_without_prefetch(row, reshard_after)
        assert report.num_gathers[rank] == gathers
        assert peak <= report.peak_gathered[rank] <= peak + 1


def test_a_gather_goes_one_computation_ahead_of_its_first_use():
    schedule = build_schedule("1f1b", pp=1, virtual=3, num_microbatches=1)
    row = lower(schedule, zero_stage=3, reshard_after="forward", reduce_each="step").actions[0]
    assert " ".join(map(str, row)) == (
        "0GATHER 1GATHER 0F0 0RESHARD 2GATHER 1F0 1RESHARD 2F0 1GATHER 2B0 2RESHARD 0GATHER 2REDUCE 1B0 1RESHARD "
        "1REDUCE 0B0 0RESHARD 0REDUCE"
    )


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_below_stage_3_nothing_is_gathered(zero_stage):
    schedule = build_schedule("1f1b", pp=2, virtual=1, num_microbatches=3)
    rows = lower(schedule, zero_stage=zero_stage, reshard_after="forward", reduce_each="step").actions
    assert not {action.op for row in rows for action in row} & {Op.GATHER, Op.RESHARD}


@pytest.mark.parametrize(("reduce_each", "expected"), [("microbatch", 10), ("step", 2)])
def test_reductions_follow_the_last_backward_directly(reduce_each, expected):
    schedule = build_schedule("1f1b", pp=1, virtual=2, num_microbatches=5)
    row = lower(schedule, zero_stage=2, reshard_after="step", reduce_each=reduce_each).actions[0]
    found = [(row[index - 1], action) for index, action in enumerate(row) if action.op is Op.REDUCE]
    assert len(found) == expected
    for before, reduce in found:
        assert (before.op, before.stage) == (Op.B, reduce.stage)
        assert before.mb == (4 if reduce_each == "step" else reduce.mb)
        assert (reduce.mb is None) == (reduce_each == "step")


ZERO_BUBBLE = parse_rows("0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2\n1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2\n")
ZERO_BUBBLE_V = parse_rows("0F0,0F1,3F0,3I0,3W0,3F1,3I1,3W1,0I0,0W0,0I1,0W1\n1F0,2F0,1F1,2F1,2I0,2W0,1I0,1W0,2B1,1B1\n")


@pytest.mark.parametrize(
    ("rows", "stage_rank", "m"), [(ZERO_BUBBLE, (0, 1), 3), (ZERO_BUBBLE_V, (0, 1, 1, 0), 2)], ids=["zb", "zbv"]
)
def test_split_backwards_and_v_placement_lower_and_pass(rows, stage_rank, m):
    schedule = Schedule("zb", 2, len(stage_rank), m, stage_rank, rows)
    for zero_stage, policy, each in product((0, 3), POLICIES, ("microbatch", "step")):
        lowered = lower(schedule, zero_stage=zero_stage, reshard_after=policy, reduce_each=each)
        check(lowered)
        for row in lowered.actions:
            reduced = [(row[index - 1], row[index]) for index in range(len(row)) if row[index].op is Op.REDUCE]
            skips = (*COMPUTE, *MESSAGES, Op.RESHARD, Op.GATHER)
            assert all(before.op in skips and before.op not in (Op.F, Op.I) for before, _ in reduced)


def test_a_schedule_that_can_never_run_is_refused():
    schedule = Schedule("bad", 2, 2, 1, (0, 1), parse_rows("0B0,0F0\n1F0,1B0\n"))
    with pytest.raises(ValueError, match="rank 0 can't start 0B0"):
        lower(schedule, zero_stage=0, reshard_after="step", reduce_each="step")
