"""Traces: what a viewer needs, the same form for simulated and measured spans."""

import json

from megalite.parallel.pp.schedules import build_schedule
from megalite.parallel.pp.simulate import simulate
from megalite.parallel.pp.trace import timeline_spans, trace_events, write_trace

MEASURED = [(1, "1F0", 0.5, 0.75), (0, "0B0", 1.0, 1.5), (0, "0F0", 0.0, 0.5), (0, "optimizer", 1.5, 1.5625)]


def complete(trace):
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_spans_become_complete_events_in_microseconds():
    events = complete(trace_events(MEASURED))
    assert [(event["tid"], event["name"], event["ts"], event["dur"]) for event in events] == [
        (0, "0F0", 0.0, 500000.0),
        (0, "0B0", 1000000.0, 500000.0),
        (0, "optimizer", 1500000.0, 62500.0),
        (1, "1F0", 500000.0, 250000.0),
    ]
    assert [event["cat"] for event in events] == ["F", "B", "optimizer", "F"]


def test_tracks_are_named_and_two_traces_can_share_a_file():
    one, two = trace_events(MEASURED), trace_events(MEASURED, process="simulated", pid=1)
    names = [(e["pid"], e["tid"], e["args"]["name"]) for e in one["traceEvents"] if e["name"] == "thread_name"]
    assert names == [(0, 0, "rank 0"), (0, 1, "rank 1")]
    heads = [e for e in one["traceEvents"] + two["traceEvents"] if e["name"] == "process_name"]
    assert [(event["pid"], event["args"]["name"]) for event in heads] == [(0, "measured"), (1, "simulated")]
    assert {event["pid"] for event in two["traceEvents"]} == {1}
    assert trace_events([])["traceEvents"] == [heads[0]]


def test_a_simulated_timeline_has_one_event_per_action(tmp_path):
    schedule = build_schedule("zbv", pp=2, virtual=2, num_microbatches=3)
    timeline = simulate(schedule, send_s=0)
    write_trace(trace_events(timeline_spans(timeline)), tmp_path / "t.json")
    events = complete(json.loads((tmp_path / "t.json").read_text()))
    for rank, row in enumerate(timeline.spans):
        track = [event for event in events if event["tid"] == rank]
        assert [event["name"] for event in track] == list(map(str, schedule.actions[rank]))
        assert [event["ts"] for event in track] == [1000 * span.start_s for span in row]
        assert all(event["dur"] == 1000 for event in track)
