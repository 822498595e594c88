"""Measured traces: every schedule runs in the order in which it was lowered and simulated; what a traced run writes."""

import json
import time
from pathlib import Path

import pytest

from megalite.config.load import load_config
from megalite.observe.spans import Spans
from megalite.parallel.pp.actions import COMPUTE
from megalite.parallel.pp.measured import executed
from megalite.parallel.pp.simulate import simulate
from megalite.train import trace
from megalite.train.build import sizes_of
from megalite.train.main import train
from megalite.train.report import Reporter
from megalite.train.signals import StopFlag
from megalite.train.step import train_step
from megalite.train.trace import StepTracer
from tests.dist.fault_tools import make_trainer, settings_of
from tests.dist.layouts import EIGHT, INTERLEAVED, ZBV, global_batch
from tests.dist.pool import mesh_for, run_ranks
from tests.dist.test_layouts import own_microbatches

ZERO3 = "mesh.dp=2 zero.stage=3 comm.cpu_backend=gloo"
RUNS = {
    2: [
        "mesh.pp=2 pipeline.schedule=gpipe",
        "mesh.pp=2 pipeline.schedule=1f1b",
        f"mesh.pp=2 {INTERLEAVED}",
        "mesh.pp=2 pipeline.schedule=zb_h1",
        "mesh.pp=2 pipeline.schedule=zb_h2",
        f"mesh.pp=2 {ZBV}",
        "mesh.pp=2 pipeline.schedule=v_half pipeline.virtual=2",
        "mesh.pp=2 pipeline.schedule=dualpipe_v pipeline.virtual=2",
        "mesh.tp=2",
        "mesh.tp=2 comm.cpu_backend=gloo",
    ],
    4: [
        f"mesh.pp=2 {INTERLEAVED} {ZERO3} zero.reshard_after=forward zero.reduce_each=microbatch",
        f"mesh.pp=2 {ZBV} {ZERO3} zero.reduce_each=step",
        f"mesh.pp=4 {EIGHT} {ZBV}",
        f"mesh.pp=4 {EIGHT} pipeline.schedule=v_half pipeline.virtual=2",
    ],
}


def traced_orders(rank, world, all_overrides):
    """Per run: what this rank should do and what it did, and the latter's computations as (name, start, end)."""
    found = []
    for overrides in all_overrides:
        trainer = make_trainer(settings_of(overrides))
        config, mesh = trainer.config, trainer.mesh
        batches = own_microbatches(config, mesh.dp.rank, global_batch(settings_of(overrides), "uneven", 0), 0)
        mesh.ledger.spans = Spans(limit=10_000)
        train_step(trainer, batches, lr=0.01)
        spans, mesh.ledger.spans = mesh.ledger.spans.take(), None
        computes = [span for span in spans if span.kind == "action" and executed([span])[0].op in COMPUTE]
        row = trainer.runtime.row
        simulated = [span.action for span in simulate(trainer.runtime.lowered).spans[mesh.pp.rank]]
        waits = [span.name for span in spans if span.kind in ("message", "collective")]
        found.append((list(row), executed(spans), simulated, [(s.name, s.start_s, s.end_s) for s in computes], waits))
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world", RUNS)
def test_ranks_run_what_was_lowered_and_simulated_in_its_order(world):
    results = run_ranks(world, traced_orders, RUNS[world], timeout_s=100)
    for overrides, *ranks in zip(RUNS[world], *results, strict=True):
        for lowered, ran, simulated, computes, waits in ranks:
            assert ran == lowered, overrides
            assert [name for name, _, _ in computes] == list(map(str, simulated))
            assert all(before[2] <= after[1] for before, after in zip(computes, computes[1:], strict=False))
            received = [f"wait {action}" for action in lowered if "RECV" in action.op]
            assert sorted(name for name in waits if "RECV" in name) == sorted(received)
            if "zero.stage=3" in overrides:
                assert {"wait zero.gather dp_shard", "wait zero.reduce dp_shard"} <= set(waits)
            assert any(name.endswith(" tp") for name in waits) == ("mesh.tp=2" in overrides)


CONFIG = """
model: {family: llama, num_layers: 4, hidden_size: 32, num_heads: 4, num_kv_heads: 2, ffn_size: 48, vocab_size: 257,
        max_seq_len: 16}
batch: {global_batch_size: 8, micro_batch_size: 1, seq_len: 16}
precision: {compute: fp64}
data: {train: [{path: docs}], split: [90, 10, 0]}
mesh: {pp: 2, dp: 2}
pipeline: {schedule: interleaved, virtual: 2}
zero: {stage: 3}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from megalite.data.prepare import prepare

    folder = tmp_path_factory.mktemp("traced")
    (folder / "c.yaml").write_text(CONFIG)
    (folder / "text.txt").write_text("".join(f"{i * i} is the square of {i}.\n" for i in range(400)))
    prepare([str(folder / "text.txt")], tokenizer="byte", output=str(folder / "docs"), workers=1)
    return folder


def run_rank(rank, world, folder, overrides):
    """One rank of a run; returns its exit code, what the reporter printed, and what the last step sent."""
    printed = []
    original = Reporter.finish
    Reporter.finish = lambda self: (setattr(self.console, "record", True), original(self), printed.append(
        self.console.export_text()))  # fmt: skip
    try:
        fixed = [f"data.train=[{{path: {folder}/docs}}]"]
        config = load_config(f"{folder}/c.yaml", [*fixed, *overrides])
        mesh = mesh_for(sizes_of(config), config.kv_replicas)
        code = train(config, mesh, StopFlag())
    finally:
        Reporter.finish = original
    assert mesh.ledger.spans is None
    return code, "".join(printed), dict(mesh.ledger.sent_bytes)


@pytest.mark.timeout(120)
def test_what_a_traced_run_writes(folder):
    results = {
        name: run_ranks(4, run_rank, str(folder), [f"run.dir={folder}/{name}", "run.steps=3", *trace], timeout_s=100)
        for name, trace in (("plain", []), ("traced", ["run.trace=true", "run.trace_steps=[2, 3]"]))
    }
    assert [code for code, _, _ in results["traced"]] == [0] * 4
    assert [sent for _, _, sent in results["traced"]] == [sent for _, _, sent in results["plain"]]
    assert not (Path(folder) / "plain" / "trace").exists()
    written = Path(folder) / "traced" / "trace"
    assert sorted(path.name for path in written.iterdir()) == [
        f"step_0000000{step}.{suffix}" for step in (2, 3) for suffix in ("json", "png")
    ]
    assert (written / "step_00000002.png").read_bytes().startswith(b"\x89PNG")
    for step in (2, 3):
        check_trace(json.loads((written / f"step_0000000{step}.json").read_text()), step)
    summary = " ".join(results["traced"][0][1].split())
    for part in ("shares of step 2", "shares of step 3", "bubble", "exposed communication"):
        assert part in summary


def check_trace(written, step):
    """One measured file: all ranks on one clock, the plan beside them, shares of the whole."""
    about = written["otherData"]
    shares = [about[name] for name in ("compute", "bubble", "exposed", "other")]
    assert about["step"] == step
    assert sum(shares) == pytest.approx(1)
    assert all(0 < share < 1 for share in shares)
    assert 0 <= about["clock_error_s"] < 0.5
    events = [event for event in written["traceEvents"] if event["ph"] == "X"]
    measured = {(e["tid"], e["name"]): (e["ts"], e["ts"] + e["dur"]) for e in events if e["pid"] == 0}
    planned = [(e["tid"], e["name"]) for e in events if e["pid"] == 1]
    planned_at = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e["pid"] == 1}
    assert {tid for tid, _ in measured} == {0, 1, 2, 3}
    assert min(start for start, _ in measured.values()) == 0
    assert len(planned) == 2 * 2 * 4 * 2 + 2  # ranks, chunks, microbatches, F and B; an optimizer each
    assert planned_at["0F0"][0] == min(measured[rank, "0F0"][0] for rank in (0, 1))
    assert about["simulated"]["compute"] == pytest.approx(1 - about["simulated"]["bubble"])
    assert all((2 * pp, name) in measured and (2 * pp + 1, name) in measured for pp, name in planned)
    tracks = {e["tid"]: e["args"]["name"] for e in written["traceEvents"] if e["name"] == "thread_name" and e["pid"] == 0}
    assert tracks == {r: f"rank {r}: pp {r // 2}, dp {r % 2}" for r in range(4)}
    waits = [(rank, name) for rank, name in measured if name.startswith("wait") and "RECV_F" in name]
    for rank, name in waits:  # nothing arrives before it was sent, on the clock of another rank
        stage, mb = name.removeprefix("wait ").split("RECV_F")
        sent = measured[(rank + 2) % 4, f"{int(stage) - 1}SEND_F{mb}"]
        assert measured[rank, name][1] > sent[0]
    assert len(waits) == 2 * 3 * 4  # dp ranks, stage boundaries, microbatches


SLOW_S = 0.8


def run_with_slow_reports(rank, world, folder, overrides):
    """One rank of a run in which rank 0 is late behind step 2, from its log, and behind step 3, from writing it."""
    log, write, draw = Reporter.step, StepTracer._write_files, trace.write_measured_picture

    def slow_log(self, step, *args, **kwargs):
        time.sleep(SLOW_S if step == 2 else 0)
        log(self, step, *args, **kwargs)

    def slow_write(self, path, *args):
        time.sleep(SLOW_S if path.stem.endswith("3") else 0)
        write(self, path, *args)

    Reporter.step, StepTracer._write_files, trace.write_measured_picture = slow_log, slow_write, lambda *_, **__: None
    try:
        return run_rank(rank, world, folder, overrides)
    finally:
        Reporter.step, StepTracer._write_files, trace.write_measured_picture = log, write, draw


@pytest.mark.timeout(60)
def test_what_rank_0_does_between_traced_steps_is_in_none_of_them(folder):
    where = Path(folder) / "slow"
    layout = ["mesh.dp=1", "zero.stage=1", "run.steps=4", "run.trace=true", "run.trace_steps=[2, 4]"]
    run_ranks(2, run_with_slow_reports, str(folder), [f"run.dir={where}", *layout], timeout_s=50)
    records = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
    times = {record["step"]: record["step_time_s"] for record in records if "step_time_s" in record}
    for step in (2, 3, 4):
        events = json.loads((where / "trace" / f"step_0000000{step}.json").read_text())["traceEvents"]
        whole = [e for e in events if e["name"] == f"step {step}"]
        begins, ends = [e["ts"] / 1e6 for e in whole], [(e["ts"] + e["dur"]) / 1e6 for e in whole]
        assert len(whole) == 2
        assert max(begins) < SLOW_S / 2
        assert max(ends) < SLOW_S  # so no share can hold what was slept before or after
        assert times[step] == pytest.approx(ends[0] - begins[0], abs=0.2)
