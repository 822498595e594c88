"""Shares of a measured step to the last digit, clocks, limits, and the config's rules."""

import pytest

from megalite.config.load import check
from megalite.mesh import Sizes, build_mesh, single_device_mesh
from megalite.observe.spans import Span, Spans
from megalite.parallel.pp import draw_measured
from megalite.parallel.pp.lower import lower
from megalite.parallel.pp.measured import Shares, Step, executed, shifted
from megalite.parallel.pp.schedules import build_schedule
from megalite.train.trace import MAX_SPANS, StepTracer, bounded_difference, make_tracer, rank_names
from tests.dist.fault_tools import settings_of


def spans(*rows):
    kinds = {"S": "step", "A": "action", "M": "message", "C": "collective", "U": "update"}
    return [Span(name, kinds[kind], start, end) for kind, name, start, end in rows]


FIRST = spans(
    ("S", "step 3", 0.0, 20.0),
    ("C", "step.tokens dp", 0.0, 1.0),
    ("A", "0F0", 1.0, 4.0),
    ("C", "mlp.down.forward tp", 2.0, 3.0),
    ("A", "0SEND_F0", 4.0, 4.0),
    ("A", "0RECV_B0", 4.0, 4.0),
    ("A", "0B0", 4.0, 15.0),
    ("M", "wait 0RECV_B0", 4.0, 13.0),  # posted at 12
    ("M", "wait 0SEND_F0", 15.0, 15.5),
    ("C", "step.scalars world", 16.0, 17.0),  # the last rank comes at 16
    ("U", "optimizer", 17.0, 19.0),
)
SECOND = spans(
    ("S", "step 3", 0.0, 20.0),
    ("A", "1RECV_F0", 0.5, 0.5),
    ("A", "1F0", 0.5, 8.0),
    ("M", "wait 1RECV_F0", 0.5, 5.0),  # posted at 4
    ("A", "1B0", 8.0, 12.0),
    ("A", "1SEND_B0", 12.0, 12.0),
    ("C", "step.scalars world", 13.0, 17.0),  # three of them for rank 0
    ("U", "optimizer", 17.0, 18.0),
)
STEP = Step([FIRST, SECOND], [(0, 1)])


def test_shares_of_a_pipeline():
    # rank 0: 3 - 1 of F, 11 - 9 of B, 2 of the update; idle 8; waits 1 + 1 + 1 + 0.5 + 1
    # rank 1: 7.5 - 4.5 of F, 4 of B, 1 of the update; idle 3.5 + 3; waits 1 + 1
    shares = STEP.shares()
    assert shares.compute == pytest.approx((6 + 8) / 40)
    assert shares.bubble == pytest.approx((8 + 6.5) / 40)
    assert shares.exposed == pytest.approx((4.5 + 2) / 40)
    assert shares.other == pytest.approx(1 - (14 + 14.5 + 6.5) / 40)
    text = Shares(0.5, 0.25, 0.125, 0.125).text()
    assert text == "compute 50.0%, bubble 25.0%, exposed communication 12.5%, other 12.5%"


def test_without_a_pipeline_no_wait_is_a_bubble():
    alone = spans(
        ("S", "step 1", 0.0, 10.0), ("A", "0F0", 0.0, 5.0), ("C", "wait zero.gather dp", 1.0, 2.0),
        ("C", "step.scalars world", 6.0, 9.0),
    )  # fmt: skip
    late = [alone[0], Span("step.scalars world", "collective", 8.0, 9.0)]
    assert Step([alone, late], [(0,), (1,)]).shares() == Shares(0.2, 0.0, 0.25, 0.55)


def test_the_plan_has_the_measured_lengths():
    _, plan = plan_of(STEP)  # F 2 and 3, B 2 and 4, each behind the one before; then updates of 2 and 1
    found = [[(str(s.action), s.start_s, s.end_s) for s in row] for row in plan.timeline.spans]
    assert found == [[("0F0", 0, 2), ("0B0", 9, 11)], [("1F0", 2, 5), ("1B0", 5, 9)]]
    shares = plan.shares()
    assert shares.compute == pytest.approx((6 / 13 + 8 / 12) / 2)
    assert shares.bubble == pytest.approx((7 / 13 + 4 / 12) / 2)
    assert (shares.exposed, shares.other) == (0, 0)


def test_the_plan_begins_with_the_first_measured_forward():
    assert [[(span.name, span.start_s, span.end_s) for span in row] for row in plan_of(STEP)[1].spans()] == [
        [("0F0", 1, 3), ("0B0", 10, 12), ("optimizer", 12, 14)],
        [("1F0", 3, 6), ("1B0", 6, 10), ("optimizer", 12, 13)],
    ]


def plan_of(step):
    schedule = build_schedule("1f1b", pp=2, virtual=1, num_microbatches=1)
    return schedule, step.planned(lower(schedule, zero_stage=0, reshard_after="step", reduce_each="step"))


def test_another_clock_and_the_order():
    assert shifted(FIRST, -0.5)[2] == Span("0F0", "action", 0.5, 3.5)
    assert list(map(str, executed(SECOND))) == ["1RECV_F0", "1F0", "1B0", "1SEND_B0"]


def drawn_by(monkeypatch, step):
    pictures = []
    monkeypatch.setattr(draw_measured, "paint", lambda picture, path: pictures.append(picture))
    schedule, planned = plan_of(STEP)
    names = [f"rank {rank}" for rank in range(len(step.spans))]
    draw_measured.write_measured_picture(schedule, step, planned, "t.png", title="measured", names=names)
    return pictures[0]


def test_a_measured_bar_begins_when_its_input_is_there(monkeypatch):
    picture = drawn_by(monkeypatch, STEP)
    bars = picture.panels[0].bars
    computed = [(bar.row, bar.start, bar.start + bar.length) for bar in bars if bar.text]
    assert computed == [(0, 1000, 4000), (0, 13000, 15000), (1, 5000, 8000), (1, 8000, 12000)]
    strips = [(round(bar.row, 2), bar.start, bar.length) for bar in bars if bar.height < 0.5]
    assert strips == [(0.36, 0, 1000), (0.36, 2000, 1000), (0.36, 16000, 1000), (1.36, 13000, 4000)]
    assert picture.length == 20_000


def test_the_plan_is_drawn_below_in_the_same_colours_and_on_the_same_scale(monkeypatch):
    measured, planned = drawn_by(monkeypatch, STEP).panels
    assert measured.title == "measured"
    assert planned.title.endswith(f"simulated with the measured lengths: {plan_of(STEP)[1].shares().text()}")
    assert (measured.rows, planned.rows) == (["rank 0", "rank 1"], ["pp 0", "pp 1"])
    computed = [(bar.row, bar.start, bar.start + bar.length) for bar in planned.bars if bar.text]
    assert computed == [(0, 1000, 3000), (0, 10000, 12000), (1, 3000, 6000), (1, 6000, 10000)]
    colours = [[bar.colour for bar in panel.bars if bar.text] for panel in (measured, planned)]
    assert colours[0] == colours[1]
    idle = [(bar.row, bar.start, bar.start + bar.length) for bar in planned.bars if bar.colour == draw_measured.IDLE]
    assert idle == [(0, 1000, 14000), (1, 1000, 13000)]


@pytest.mark.parametrize("with_plan", [True, False])
def test_a_picture_of_more_ranks_than_fit(tmp_path, with_plan):
    step = Step([FIRST, SECOND] * 20, [(2 * i, 2 * i + 1) for i in range(20)])
    schedule, plan = plan_of(step)
    path, names = tmp_path / "t.png", [f"rank {rank}" for rank in range(40)]
    draw_measured.write_measured_picture(schedule, step, plan if with_plan else None, path, title="t", names=names)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_difference_of_two_clocks_is_within_its_bound():
    barriers = [(0.0, 0.2), (1.0, 1.1), (2.0, 2.5)]  # both are inside from the first to the second time
    first = [[came - 0.05 for came, _ in barriers], [left + 0.01 for _, left in barriers]]
    for true in (5.0, -3.0):
        own = [[came + true for came, _ in barriers], [left + 0.02 + true for _, left in barriers]]
        found, bound = bounded_difference(own, first)
        assert abs(found - true) <= bound < 0.15
    own = [[came for came, _ in barriers], [left for _, left in barriers]]
    found, bound = bounded_difference(own, first)
    assert found == 0.0  # one clock is taken as one
    assert bound == pytest.approx(0.15)


def test_spans_nest_and_are_bounded():
    recorded = Spans(limit=3)
    with recorded.span("step 1", "step"):
        with recorded.span("0F0", "action"), recorded.span("wait 0RECV_F0", "message"):
            pass
        with recorded.span("0B0", "action"):
            pass
    step, forward, wait = recorded.take()
    assert (step.name, forward.name, wait.name) == ("step 1", "0F0", "wait 0RECV_F0")
    assert 0 <= step.start_s <= forward.start_s <= wait.start_s <= wait.end_s <= forward.end_s <= step.end_s
    assert recorded.num_dropped == 1


def tracer_of(*overrides, start=0):
    config = check(settings_of(" ".join(overrides)), {}, name="x")
    trainer = type("Trainer", (), {"config": config, "mesh": single_device_mesh()})()
    return make_tracer(trainer, start=start)


def test_which_steps_are_traced(caplog):
    assert (tracer_of("run.steps=9").first, tracer_of("run.steps=9").last) == (0, 0)
    for start, steps, expected in ((0, 9, (3, 4)), (0, 3, (3, 3)), (0, 1, (1, 1)), (4, 9, (7, 8)), (7, 9, (9, 9))):
        found = tracer_of(f"run.steps={steps} run.trace=true", start=start)
        assert (found.first, found.last) == expected
    found = tracer_of("run.steps=9 run.trace=true run.trace_steps=[2,5]", start=6)
    assert (found.first, found.last, found.limit) == (2, 5, MAX_SPANS)


def test_a_step_that_fails_is_no_longer_recorded():
    trainer = type("Trainer", (), {"mesh": single_device_mesh()})()
    seen = []

    def fail():
        with StepTracer(trainer, first=1, last=1).step(1):
            seen.append(trainer.mesh.ledger.spans)
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert isinstance(seen[0], Spans)
    assert trainer.mesh.ledger.spans is None


def test_rank_names():
    mesh = type("Mesh", (), {"sizes": Sizes(pp=2, dp_replicate=2, dp_shard=2, tp=1)})()
    assert rank_names(mesh)[7] == "rank 7: pp 1, dp 3"
    assert rank_names(build_mesh(Sizes(), device="cpu", timeout_s=1)) == {0: "rank 0"}


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ("run.trace_steps=[1,2]", r"run.trace_steps=\[1, 2\] has no effect with run.trace=false"),
        ("run.trace=true run.steps=3 run.trace_steps=[2,4]", r"up to run.steps=3; use e.g. \[2, 3\]"),
        ("run.trace=true run.steps=3 run.trace_steps=[3,2]", r"use e.g. \[3, 3\]"),
    ],
)
def test_wrong_inputs(overrides, match):
    with pytest.raises(ValueError, match=match):
        check(settings_of(overrides), {}, name="x")
