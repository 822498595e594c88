"""Schedules: golden files, the published order, sizes that are refused, and the memory each kind promises."""

from pathlib import Path

import pytest

from megalite.parallel.pp.actions import Op, read_csv
from megalite.parallel.pp.check import check
from megalite.parallel.pp.lower import lower
from megalite.parallel.pp.schedules import BUILDERS, build_schedule, forward_only

GOLDEN = Path(__file__).parent.parent / "golden" / "schedules"


def report(schedule):
    return check(lower(schedule, zero_stage=0, reshard_after="step", reduce_each="step"))


@pytest.mark.parametrize(
    ("kind", "pp", "virtual", "num_microbatches"),
    [("gpipe", 3, 1, 4), ("1f1b", 4, 1, 6), ("1f1b", 4, 1, 2), ("1f1b", 1, 2, 2), ("interleaved", 2, 2, 4)],
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


@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("virtual", [1, 2])
@pytest.mark.parametrize("num_microbatches", range(1, 10))
def test_every_size_is_complete_or_refused_with_its_numbers(kind, pp, virtual, num_microbatches):
    takes = pp == 1 or (num_microbatches % pp == 0 if kind == "interleaved" else virtual == 1)
    if takes:
        schedule = build_schedule(kind, pp=pp, virtual=virtual, num_microbatches=num_microbatches)
        assert schedule.stage_rank == tuple(stage % pp for stage in range(pp * virtual))
        assert sum(map(len, schedule.actions)) == 2 * pp * virtual * num_microbatches
        report(schedule)
    else:
        given = f"num_microbatches={num_microbatches}" if kind == "interleaved" else f"virtual={virtual}"
        with pytest.raises(ValueError, match=rf"mesh\.pp={pp}[\s\S]*use ") as error:
            build_schedule(kind, pp=pp, virtual=virtual, num_microbatches=num_microbatches)
        assert given in str(error.value)


def test_refusal_offers_numbers_that_work():
    with pytest.raises(ValueError, match="use 8 or 12 microbatches"):
        build_schedule("interleaved", pp=4, virtual=2, num_microbatches=10)
    with pytest.raises(ValueError, match="use 4 microbatches"):
        build_schedule("interleaved", pp=4, virtual=2, num_microbatches=3)


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


@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.parametrize(("pp", "virtual", "num_microbatches"), [(1, 3, 2), (2, 2, 3), (4, 2, 1), (4, 1, 7)])
def test_evaluation_takes_any_number_of_microbatches_on_the_training_placement(kind, pp, virtual, num_microbatches):
    schedule = forward_only(kind, pp=pp, virtual=virtual, num_microbatches=num_microbatches)
    assert schedule.stage_rank == tuple(stage % pp for stage in range(pp * virtual))
    assert {action.op for row in schedule.actions for action in row} == {Op.F}
    proved = report(schedule)
    assert proved.peak_live == (1,) * pp
    assert proved.num_reduces == (0,) * pp
    assert sum(proved.num_messages) == (0 if pp == 1 else 2 * (pp * virtual - 1) * num_microbatches)
