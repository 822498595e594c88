"""tools/bench_comm.py: its goals and tables on made-up numbers, and tiny runs of both sections on two ranks."""

import json
import sys
from pathlib import Path

import pytest

from megalite import native

TOOLS = str(Path(__file__).resolve().parents[2] / "tools")
sys.path.insert(0, TOOLS)
bench_comm = __import__("bench_comm")
from bench import comm_cases, comm_measure, comm_tables, measure, rows, tables  # noqa: E402
from bench.comm_cases import KB, MB, Case, Timing  # noqa: E402

while TOOLS in sys.path:
    sys.path.remove(TOOLS)
EFFORT = measure.Effort(rounds=2, steps=1, warmup=1)
ABOUT = {"plan": comm_cases.TINY, "work": rows.TINY, "effort": EFFORT, "where": tables.machine()}


def test_a_ratio_is_of_the_same_round():
    timing = Timing(Case("all_reduce", 2, MB), {"shm": [1.0, 2.0, 1.0], "gloo": [1.5, 2.0, 3.0]})
    assert timing.ratio("gloo") == 1.5  # rounds: 1.5, 1, 3
    assert timing.median_s("shm") == 1.0
    assert timing.ratio("own") is None
    assert timing.median_s("own") is None


def test_a_round_takes_as_long_as_its_slowest_rank():
    of_ranks = [{"shm": [1.0, 5.0], "gloo": [2.0, 2.0]}, {"shm": [3.0, 4.0], "gloo": [1.0, 9.0]}]
    assert comm_cases.merged(Case("barrier", 2), of_ranks).seconds == {"shm": [3.0, 5.0], "gloo": [2.0, 9.0]}


def test_goals():
    goal = comm_cases.goal
    assert goal(Case("all_reduce", 2, 4 * MB)) == ("gloo", 3.0)
    assert goal(Case("all_reduce", 4, 4 * MB)) == ("gloo", 1.0)
    assert goal(Case("reduce_scatter", 2, 4 * MB, "bfloat16")) == ("own", 5.0)
    assert goal(Case("reduce_scatter", 2, MB)) == ("gloo", 1.0)
    assert goal(Case("broadcast", 4, 64 * KB)) == ("gloo", 1.0)
    assert goal(Case("broadcast", 4, 4 * KB)) is None
    assert goal(Case("barrier", 2)) is None


@pytest.mark.parametrize(
    ("case", "seconds", "held"),
    [
        (Case("all_reduce", 2, 4 * MB), {"shm": [1.0], "gloo": [3.0]}, True),
        (Case("all_reduce", 2, 4 * MB), {"shm": [1.0], "gloo": [2.9]}, False),
        (Case("all_gather", 2, MB), {"shm": [1.0], "gloo": [0.9]}, False),
        (Case("reduce_scatter", 2, 4 * MB), {"shm": [1.0], "gloo": [2.0], "own": [5.0]}, True),
        (Case("reduce_scatter", 2, 4 * MB), {"shm": [1.0], "gloo": [2.0], "own": [4.0]}, False),
        (Case("reduce_scatter", 2, 4 * MB), {"shm": [1.0], "gloo": [0.9], "own": [5.0]}, False),
        (Case("all_reduce", 2, 4 * MB), {"gloo": [3.0]}, None),
        (Case("barrier", 2), {"shm": [9.0], "gloo": [1.0]}, None),
    ],
)
def test_whether_a_goal_holds(case, seconds, held):
    assert comm_cases.holds(Timing(case, seconds)) is held


def test_every_case_divides_by_its_ranks():
    for plan in (comm_cases.FULL, comm_cases.QUICK, comm_cases.TINY):
        for size in plan.sizes:
            cases = plan.cases(size)
            assert len(set(cases)) == len(cases)
            assert all(case.num_bytes % (4 * size) == 0 for case in cases)
    wanted = {(op, size, 4 * MB) for op in ("all_reduce", "reduce_scatter") for size in (2, 4)}
    assert wanted <= {(c.op, c.size, c.num_bytes) for size in (2, 4) for c in comm_cases.QUICK.cases(size)}


def step(label: str, block_s: list[float], traffic=None):
    """A contestant of the training step."""
    values = {"tokens_per_s": 100.0, "cpu_s": 2.0, "wire_bytes": 285e6, "peak_rss_bytes": (1, 2), "losses": [1.0]}
    values["block_cpu_s"] = block_s
    return measure.Result("tp2", label, ours=True, block_s=block_s, traffic=traffic, **values)


def test_missed_goals_are_said():
    traffic = {"tp all_gather": 3e6, "tp reduce_scatter": 1e6}
    found = comm_measure.Found(
        timings=[
            Timing(Case("all_reduce", 2, 4 * MB), {"shm": [1e-3], "gloo": [2e-3]}),
            Timing(Case("all_gather", 2, MB), {"shm": [1e-3], "gloo": [2e-3]}),
        ],
        steps=[
            step(comm_measure.GLOO.label, [1.0, 1.0], traffic),
            step(comm_measure.SHM.label, [1.0, 1.0], traffic),
            step(comm_measure.DTENSOR.label, [1.3, 1.3]),
        ],
    )
    assert comm_tables.missed(found) == [
        "MISSED all_reduce 4 MB float32 on 2 ranks: gloo 2.00x; goal 3x",
        "MISSED megalite, shm: 1.30x DTensor's tokens/s; goal 1.4x",
    ]
    text = comm_tables.report(found, **ABOUT, markdown=True)
    assert "| all_reduce | 2 | float32 | 4 MB | 2000 us |  | 1000 us | 4.19 | 2.00x |  | gloo >= 3x | MISSED |" in text
    assert "| megalite, gloo | 100 | 2 | 285.0 | 4.0 | 1.30x | >= 1.2x | holds |" in text
    assert "| tp | all_gather | 3.000 | 75.0% |" in text
    numbers = json.loads(json.dumps(comm_tables.numbers(found, **ABOUT)))
    assert [line["holds"] for line in numbers["collectives"]] == [False, True]
    assert [line["holds"] for line in numbers["steps"]] == [True, False, None]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tiny_collectives(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)  # for the ranks
    found = comm_measure.Found()
    comm_measure.measure_collectives(comm_cases.TINY, found, folder=tmp_path, say=lambda text: None)
    assert not found.failed
    assert [timing.case for timing in found.timings] == comm_cases.TINY.cases(2)
    names = {"shm", "gloo"} if native.load() is not None else {"gloo"}
    assert (native.load() is None) == bool(found.missing)
    for timing in found.timings:
        assert set(timing.seconds) == (names | {"own"} if timing.case.op == "reduce_scatter" else names)
        assert all(len(own) == comm_cases.TINY.rounds and min(own) > 0 for own in timing.seconds.values())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tiny_steps(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    found = comm_measure.Found(missing={} if native.load() is not None else {2: "no extension"})
    effort = measure.Effort(rounds=1, steps=1, warmup=1)
    comm_measure.measure_steps(rows.TINY, found, effort=effort, folder=tmp_path, say=lambda text: None)
    assert not found.failed
    steps = {step.label: step for step in found.steps}
    for label in set(steps) - {comm_measure.DTENSOR.label}:
        assert steps[label].losses == pytest.approx(steps[comm_measure.DTENSOR.label].losses, abs=2e-6)
        assert steps[label].traffic == steps[comm_measure.GLOO.label].traffic
    assert steps[comm_measure.GLOO.label].traffic["tp all_gather"] > 1e6
    if (wire := steps[comm_measure.GLOO.label].wire_bytes) is not None:
        assert (
            sum(steps[comm_measure.GLOO.label].traffic.values()) < wire < steps[comm_measure.DTENSOR.label].wire_bytes
        )
