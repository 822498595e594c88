"""The proof rejects planted faults, each with its own message, and knows a deadlock when it sees one."""

from dataclasses import replace

import pytest

from megalite.parallel.pp.actions import Action, Op, parse_action, parse_rows
from megalite.parallel.pp.check import ScheduleError, check
from megalite.parallel.pp.lower import Lowered, lower
from megalite.parallel.pp.schedule import Schedule
from megalite.parallel.pp.schedules import build_schedule, forward_only


def good(reduce_each="microbatch", kind="1f1b", virtual=1, pp=2, m=4, zero_stage=3):
    schedule = build_schedule(kind, pp=pp, virtual=virtual, num_microbatches=m)
    return lower(schedule, zero_stage=zero_stage, reshard_after="microbatch", reduce_each=reduce_each)


def edit(lowered, rank, change):
    """The same lists with one rank's list changed in place by `change`."""
    rows = [list(row) for row in lowered.actions]
    change(rows[rank])
    return replace(lowered, actions=tuple(map(tuple, rows)))


def drop(text):
    return lambda row: row.remove(parse_action(text))


def repeat(text):
    return lambda row: row.insert(row.index(parse_action(text)), parse_action(text))


def put(text, before):
    return lambda row: row.insert(row.index(parse_action(before)), parse_action(text))


def swap(one, two):
    def change(row):
        first, second = row.index(parse_action(one)), row.index(parse_action(two))
        row[first], row[second] = row[second], row[first]

    return change


def to_front(text):
    def change(row):
        row.insert(0, row.pop(row.index(parse_action(text))))

    return change


FAULTS = {
    "duplicated F": (0, repeat("0F1"), "0F1 a second time"),
    "duplicated B": (0, repeat("0B1"), "0B1 without a forward in flight|0B1 a second time"),
    "missing F": (1, drop("1F2"), "1B2 without a forward in flight"),
    "missing B": (0, drop("0B3"), "unreduced microbatches are \\[\\]"),
    "B before its F": (1, swap("1F1", "1B1"), "1B1 without a forward in flight"),
    "foreign stage": (0, put("1F0", before="0F1"), "1F0 on rank 0, but stage 1 is on rank 1"),
    "no such stage": (0, put("2F0", before="0F1"), "2F0: there are 2 stages"),
    "no such microbatch": (0, put("0F4", before="0F1"), "0F4: there are 4 microbatches"),
    "F before its input": (1, swap("1RECV_F1", "1F1"), "1F1 before its input 1RECV_F1"),
    "B before its input": (0, swap("0RECV_B0", "0B0"), "0B0 before its input 0RECV_B0"),
    "missing SEND": (0, drop("0SEND_F1"), "message 1 between ranks 0 and 1 is 0RECV_B0 on rank 0 but 1RECV_F1"),
    "missing RECV": (1, drop("1RECV_F2"), "1F2 before its input"),
    "repeated SEND": (0, repeat("0SEND_F0"), "0SEND_F0 a second time"),
    "SEND before the computation": (0, swap("0SEND_F0", "0F0"), "0SEND_F0 before 0F0"),
    "SEND_B before the computation": (1, swap("1SEND_B0", "1B0"), "1SEND_B0 before 1B0 or 1I0"),
    "messages swapped on one side": (0, swap("0RECV_B0", "0SEND_F1"), "message 1 between ranks 0 and 1"),
    "message past the end": (1, put("1SEND_F0", before="1B0"), "1SEND_F0: there is no stage 2"),
    "missing GATHER": (0, drop("0GATHER"), "0F0 while stage 0 is not gathered"),
    "missing RESHARD": (0, drop("0RESHARD"), "stages \\[0\\] are never freed"),
    "missing RESHARD before a GATHER": (1, drop("1RESHARD"), "1GATHER, but the stage is gathered"),
    "early RESHARD": (0, lambda row: (drop("0RESHARD")(row), put("0RESHARD", before="0B3")(row)), "0B3 while stage 0"),
    "missing REDUCE": (0, drop("0REDUCE1"), "0REDUCE2, but the unreduced microbatches are \\[1, 2\\]"),
    "missing last REDUCE": (0, drop("0REDUCE3"), "stage 0: gradients are never reduced"),
    "repeated REDUCE": (1, repeat("1REDUCE1"), "unreduced microbatches are \\[\\]|1REDUCE1 a second time"),
    "REDUCE before the B": (1, swap("1REDUCE1", "1B1"), "1REDUCE1, but the unreduced microbatches are"),
    "REDUCE of the step": (1, put("1REDUCE", before="1REDUCE1"), "1REDUCE with zero.reduce_each=microbatch"),
    "F without microbatch": (0, lambda row: row.insert(1, Action(Op.F, 0)), "0F has no microbatch"),
    "SEND without microbatch": (0, lambda row: row.insert(0, Action(Op.SEND_F, 0)), "0SEND_F has no microbatch"),
}


def test_the_unchanged_lists_pass():
    assert check(good()).peak_live == (2, 1)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("blocking", [True, False])
def test_planted_faults_are_rejected(fault, blocking):
    rank, change, message = FAULTS[fault]
    with pytest.raises(ScheduleError, match=message):
        check(edit(good(), rank, change), blocking=blocking)


def test_every_single_dropped_action_is_rejected():
    """But for a GATHER with its RESHARD, no action is redundant: dropping any one of them is seen."""
    lowered = good(kind="interleaved", virtual=2)
    for rank, row in enumerate(lowered.actions):
        for index in range(len(row)):
            with pytest.raises(ScheduleError):
                check(edit(lowered, rank, lambda changed, index=index: changed.pop(index)))


def test_step_reductions_come_once_and_last():
    lowered = good(reduce_each="step")
    check(lowered)
    with pytest.raises(ScheduleError, match="1REDUCE after 3 of 4 backwards"):
        check(edit(lowered, 1, swap("1REDUCE", "1B3")))
    with pytest.raises(ScheduleError, match="gradients are never reduced"):
        check(edit(lowered, 1, drop("1REDUCE")))
    with pytest.raises(ScheduleError, match=r"1REDUCE3 with zero.reduce_each=step"):
        check(edit(lowered, 1, put("1REDUCE3", before="1REDUCE")))


def test_gathers_below_stage_3_and_messages_within_a_rank_are_rejected():
    with pytest.raises(ScheduleError, match="0GATHER at ZeRO stage 2"):
        check(edit(good(zero_stage=2), 0, put("0GATHER", before="0F0")))
    with pytest.raises(ScheduleError, match="0SEND_F0: stage 1 is on the same rank"):
        check(edit(good(pp=1, virtual=2), 0, put("0SEND_F0", before="1F0")))


def test_same_rank_neighbours_must_come_in_order():
    lowered = good(pp=1, virtual=2)
    with pytest.raises(ScheduleError, match="1F0 before its input 0F0"):
        check(edit(lowered, 0, swap("0F0", "1F0")))
    with pytest.raises(ScheduleError, match="0B0 before its input 1B0 or 1I0"):
        check(edit(lowered, 0, swap("0B0", "1B0")))


def test_backwards_in_evaluation_and_forgotten_forwards_are_rejected():
    schedule = forward_only("1f1b", pp=2, virtual=1, num_microbatches=2)
    lowered = lower(schedule, zero_stage=0, reshard_after="step", reduce_each="step")
    check(lowered)
    with pytest.raises(ScheduleError, match="0B0 in a forward pass"):
        check(edit(lowered, 0, lambda row: row.append(parse_action("0B0"))))
    with pytest.raises(ScheduleError, match="1F1 is missing"):
        check(edit(lowered, 1, drop("1F1")))


SPLIT = parse_rows("0F0,0F1,0I0,0W0,0I1,0W1,0REDUCE\n")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap("0I0", "0W0"), "0W0 before 0I0"),
        (drop("0W1"), "0REDUCE after 1 of 2 backwards"),
        (put("0B0", before="0W0"), "0B0 after 0I0: the gradient twice"),
        (repeat("0W0"), "0W0 a second time|0W0 without a forward in flight"),
        (drop("0I1"), "0W1 before 0I1"),
    ],
)
def test_split_backwards_are_one_input_then_one_weight_gradient(change, message):
    lowered = Lowered(Schedule("split", 1, 1, 2, (0,), ()), SPLIT, 0, "step", "step")
    check(lowered)
    with pytest.raises(ScheduleError, match=message):
        check(edit(lowered, 0, change))


def loop(text):
    """Forward passes of 2 microbatches over 6 stages on 3 ranks, from text."""
    schedule = forward_only("interleaved", pp=3, virtual=2, num_microbatches=2)
    return Lowered(schedule, parse_rows(text), 0, "step", "step")


@pytest.mark.parametrize("blocking", [True, False])
def test_a_cycle_of_ranks_is_a_deadlock_on_both_machines(blocking):
    """Rank 0 waits for 2F0, which waits for 2F1, which waits for 1F1, which waits for 0F1, behind rank 0's wait."""
    lowered = loop(
        "0F0,0SEND_F0,3RECV_F0,3F0,3SEND_F0,0F1,0SEND_F1,3RECV_F1,3F1,3SEND_F1\n"
        "1RECV_F0,1F0,1SEND_F0,4RECV_F0,1RECV_F1,1F1,1SEND_F1,4F0,4SEND_F0,4RECV_F1,4F1,4SEND_F1\n"
        "2RECV_F0,2RECV_F1,2F1,2F0,2SEND_F0,2SEND_F1,5RECV_F0,5F0,5RECV_F1,5F1\n"
    )
    with pytest.raises(ScheduleError, match=r"deadlock: rank 0 at 3.*F0, rank 1 at .*, rank 2 at 2") as error:
        check(lowered, blocking=blocking)
    assert str(error.value).count("<-- here") == 3


def test_a_receive_ahead_of_its_turn_ends_only_where_each_pair_has_its_own_queue():
    schedule = forward_only("interleaved", pp=3, virtual=2, num_microbatches=2)
    lowered = lower(schedule, zero_stage=0, reshard_after="step", reduce_each="step")
    early = edit(lowered, 0, to_front("3RECV_F0"))
    check(early, blocking=False)
    with pytest.raises(ScheduleError, match="deadlock: rank 0 at 0SEND_F0, rank 1 at 1F0, rank 2 at 2F0"):
        check(early)


def test_messages_swapped_on_both_sides_are_rejected():
    """The queues agree, but rank 0 would send what it has not computed yet."""
    lowered = edit(good(), 0, swap("0SEND_F0", "0SEND_F1"))
    with pytest.raises(ScheduleError, match="0SEND_F1 before 0F1"):
        check(edit(lowered, 1, swap("1RECV_F0", "1RECV_F1")))


def test_the_error_shows_the_place():
    with pytest.raises(ScheduleError) as error:
        check(edit(good(), 1, drop("1RECV_F2")))
    lines = str(error.value).splitlines()
    assert lines[0] == "1f1b: 1F2 before its input 1RECV_F2"
    assert lines[1].startswith("  rank 1: ... ")
    assert lines[1].endswith(" 1F2  <-- here")
    assert lines[2].startswith("          then 1")
