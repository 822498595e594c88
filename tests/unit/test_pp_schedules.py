"""Schedules: golden files, the published order, sizes that are refused, and the memory each kind promises."""

from itertools import pairwise
from pathlib import Path

import pytest

from megalite.config.pipeline import SCHEDULES
from megalite.parallel.pp.actions import Op, read_csv
from megalite.parallel.pp.check import check
from megalite.parallel.pp.lower import lower
from megalite.parallel.pp.schedules import BUILDERS, build_schedule, forward_only

GOLDEN = Path(__file__).parent.parent / "golden" / "schedules"


def report(schedule):
    return check(lower(schedule, zero_stage=0, reshard_after="step", reduce_each="step"))


@pytest.mark.parametrize(
    ("kind", "pp", "virtual", "num_microbatches"),
    [
        ("gpipe", 3, 1, 4),
        ("1f1b", 4, 1, 6),
        ("1f1b", 4, 1, 2),
        ("1f1b", 1, 2, 2),
        ("interleaved", 2, 2, 4),
        ("zb_h1", 4, 1, 6),
        ("zb_h1", 3, 1, 2),
        ("zb_h2", 3, 1, 6),
        ("zbv", 3, 2, 6),
        ("zbv", 3, 2, 2),
        ("v_half", 3, 2, 6),
        ("v_half", 4, 2, 4),
        ("dualpipe_v", 4, 2, 8),
    ],
)
def test_compute_order_is_the_golden_one(kind, pp, virtual, num_microbatches):
    schedule = build_schedule(kind, pp=pp, virtual=virtual, num_microbatches=num_microbatches)
    assert schedule.actions == read_csv(GOLDEN / f"{kind}_pp{pp}_v{virtual}_m{num_microbatches}.csv")


def test_lowered_order_is_the_golden_one():
    schedule = build_schedule("interleaved", pp=2, virtual=2, num_microbatches=2)
    lowered = lower(schedule, zero_stage=3, reshard_after="microbatch", reduce_each="microbatch")
    assert lowered.actions == read_csv(GOLDEN / "interleaved_pp2_v2_m2_zero3.csv")


@pytest.mark.parametrize(("pp", "virtual", "num_microbatches"), [(2, 2, 4), (4, 2, 8), (4, 3, 4), (3, 4, 9)])
def test_interleaved_follows_the_published_order(pp, virtual, num_microbatches):
    """The k-th forward of a rank is chunk (k mod pp*v) / pp, and its backward counts chunks from the end."""
    schedule = build_schedule("interleaved", pp=pp, virtual=virtual, num_microbatches=num_microbatches)
    for rank, row in enumerate(schedule.actions):
        for op in (Op.F, Op.B):
            actions = [action for action in row if action.op is op]
            for k, action in enumerate(actions):
                chunk = k % (pp * virtual) // pp
                chunk = chunk if op is Op.F else virtual - 1 - chunk
                assert action.stage == chunk * pp + rank
                assert action.mb == k // (pp * virtual) * pp + k % pp
        first_backward = [action.op for action in row].index(Op.B)
        warmup = min(2 * (pp - 1 - rank) + (virtual - 1) * pp, virtual * num_microbatches)
        assert first_backward == min(warmup + 1, virtual * num_microbatches)


CHUNKS = {"gpipe": 1, "1f1b": 1, "zb_h1": 1, "zb_h2": 1, "zbv": 2, "v_half": 2, "dualpipe_v": 2}
"""Chunks per rank of each kind but interleaved, which takes any number."""


def takes(kind, pp, virtual, num_microbatches):
    if kind == "interleaved":
        return num_microbatches % pp == 0
    return virtual == CHUNKS[kind] or (pp == 1 and kind in ("gpipe", "1f1b"))


def placement(kind, pp, virtual):
    loop = tuple(stage % pp for stage in range(pp * virtual))
    return (*range(pp), *range(pp - 1, -1, -1)) if CHUNKS.get(kind) == 2 else loop


@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("virtual", [1, 2])
def test_every_size_is_complete_or_refused_with_its_numbers(kind, pp, virtual):
    for m in range(1, 10):
        if takes(kind, pp, virtual, m):
            schedule = build_schedule(kind, pp=pp, virtual=virtual, num_microbatches=m)
            assert schedule.stage_rank == placement(kind, pp, virtual)
            ops = [action.op for row in schedule.actions for action in row]
            assert ops.count(Op.F) == ops.count(Op.B) + ops.count(Op.W) == pp * virtual * m
            report(schedule)
        else:
            given = f"num_microbatches={m}" if kind == "interleaved" else f"virtual={virtual}"
            with pytest.raises(ValueError, match=rf"mesh\.pp={pp}[\s\S]*use ") as error:
                build_schedule(kind, pp=pp, virtual=virtual, num_microbatches=m)
            assert given in str(error.value)


def test_the_table_of_sizes_has_every_kind():
    assert set(SCHEDULES) == set(BUILDERS) == {*CHUNKS, "interleaved"}


@pytest.mark.parametrize("kind", ["zb_h1", "zb_h2", "zbv", "v_half"])
def test_zero_bubble_kinds_split_every_backward(kind):
    schedule = build_schedule(kind, pp=4, virtual=CHUNKS[kind], num_microbatches=9)
    assert {action.op for row in schedule.actions for action in row} == {Op.F, Op.I, Op.W}


def test_dualpipe_v_pairs_forwards_with_whole_backwards_of_the_other_chunk():
    row = build_schedule("dualpipe_v", pp=4, virtual=2, num_microbatches=20).actions[3]
    text = " ".join(map(str, row))
    assert text.startswith("3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3 3F4 4B0 4F4 3B0 3F5 4B1 4F5 3B1")


def test_refusal_offers_sizes_that_work():
    with pytest.raises(ValueError, match="use 8 or 12, or pipeline.schedule=1f1b"):
        build_schedule("interleaved", pp=4, virtual=2, num_microbatches=10)
    with pytest.raises(ValueError, match="use 4, or pipeline.schedule=1f1b"):
        build_schedule("interleaved", pp=4, virtual=2, num_microbatches=3)
    with pytest.raises(
        ValueError, match=r"zbv takes 2 chunks per rank, not pipeline\.virtual=1 .*use pipeline\.virtual=2"
    ):
        build_schedule("zbv", pp=4, virtual=1, num_microbatches=8)


@pytest.mark.parametrize("build", [build_schedule, forward_only])
def test_unknown_kinds_and_empty_sizes_are_refused(build):
    with pytest.raises(ValueError, match=r"pipeline\.schedule=1b1f is unknown; use gpipe, 1f1b, interleaved"):
        build("1b1f", pp=2, virtual=1, num_microbatches=2)
    for name, sizes in {"mesh.pp": (0, 1, 1), "pipeline.virtual": (1, 0, 1), "num_microbatches": (1, 1, 0)}.items():
        with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
            build("1f1b", pp=sizes[0], virtual=sizes[1], num_microbatches=sizes[2])


def test_peak_live_activations():
    """GPipe holds all m, 1F1B at most pp - rank, interleaved its warm-up and one more."""
    assert report(build_schedule("gpipe", pp=4, virtual=1, num_microbatches=9)).peak_live == (9, 9, 9, 9)
    assert report(build_schedule("1f1b", pp=4, virtual=1, num_microbatches=9)).peak_live == (4, 3, 2, 1)
    assert report(build_schedule("1f1b", pp=4, virtual=1, num_microbatches=2)).peak_live == (2, 2, 2, 1)
    assert report(build_schedule("interleaved", pp=4, virtual=2, num_microbatches=8)).peak_live == (11, 9, 7, 5)
    assert report(build_schedule("1f1b", pp=1, virtual=3, num_microbatches=5)).peak_live == (3,)


@pytest.mark.parametrize("pp", range(1, 9))
def test_zero_bubble_kinds_hold_the_same_on_every_rank(pp):
    """In microbatches of a stage, of which a V has two per rank; 1F1B's first rank holds pp and 2 pp of them."""
    peaks = {"zb_h1": pp, "zb_h2": 2 * pp - 1, "zbv": 2 * pp, "dualpipe_v": 2 * pp + 1}
    peaks["v_half"] = pp + 1 if pp % 2 else pp + 2
    for kind, peak in peaks.items():
        for m in (2 * pp, 3 * pp + 1):
            schedule = build_schedule(kind, pp=pp, virtual=CHUNKS[kind], num_microbatches=m)
            assert report(schedule).peak_live == (peak,) * pp, (kind, m)


@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.parametrize(("pp", "num_microbatches"), [(1, 2), (2, 3), (3, 7), (4, 1), (4, 9)])
def test_evaluation_takes_any_number_of_microbatches_on_the_training_placement(kind, pp, num_microbatches):
    virtual = CHUNKS.get(kind, 3)
    schedule = forward_only(kind, pp=pp, virtual=virtual, num_microbatches=num_microbatches)
    assert schedule.stage_rank == placement(kind, pp, virtual)
    assert {action.op for row in schedule.actions for action in row} == {Op.F}
    proved = report(schedule)
    assert proved.peak_live == (1,) * pp
    assert proved.num_reduces == (0,) * pp
    crossings = sum(one != two for one, two in pairwise(schedule.stage_rank))
    assert sum(proved.num_messages) == 2 * crossings * num_microbatches
