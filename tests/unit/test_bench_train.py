"""tools/bench_train.py at toy sizes: both sides train alike, bytes are counted, failures are named, ratios hold."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
TOOLS = str(ROOT / "tools")
sys.path.insert(0, TOOLS)
bench_train = __import__("bench_train")
from bench import data, goals, job, measure, megalite_side, network, rows, tables, torch_model, torch_side  # noqa: E402
from bench import output as bench_output  # noqa: E402

while TOOLS in sys.path:
    sys.path.remove(TOOLS)
ONE = rows.selected(["one"])[0]
EFFORT = measure.Effort(rounds=2, steps=1, warmup=1)
needs_namespace = pytest.mark.skipif(not network.available(), reason="needs root on Linux for a network namespace")


@pytest.fixture
def weights(tmp_path):
    path = str(tmp_path / "weights.pt")
    megalite_side.save_weights(rows.TINY, path)
    return path


def test_both_sides_train_alike(weights):
    sides = [side.Trainer(ONE, rows.TINY, "", weights) for side in (megalite_side, torch_side)]
    for step in range(4):
        batch = data.batch(rows.TINY, step)
        ours, theirs = (side.step(*batch, step) for side in sides)
        assert ours == pytest.approx(theirs, abs=2e-6)
    assert ours < 4.85  # below log(128): it learns, so the updates count too


def test_stages_make_up_the_model(weights):
    whole = torch_model.Stage(rows.TINY, 0, 1)
    stages = [torch_model.Stage(rows.TINY, index, 4) for index in range(4)]
    for module in (whole, *stages):
        module.load(weights)
    x = tokens = data.batch(rows.TINY, 0)[0]
    for stage in stages:
        x = stage(x)
    torch.testing.assert_close(x, whole(tokens))


def test_the_shares_of_a_batch(weights):
    whole, labels = data.batch(rows.TINY, 3)
    assert torch.equal(whole[:, 1:], labels[:, :-1])
    assert torch.equal(torch.cat([data.share(whole, rank, 2) for rank in range(2)]), whole)
    assert not torch.equal(whole, data.batch(rows.TINY, 4)[0])


@pytest.mark.parametrize("row", rows.ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("work", [rows.Work(), rows.TINY], ids=["full", "tiny"])
def test_every_row_is_a_valid_config(row, work):
    config = megalite_side.config_of(row, work)
    assert config.world_size == row.world_size
    placed = [torch_side.stage_indices(row, rank) for rank in range(row.pp)]
    assert sorted(stage for stages in placed for stage in stages) == list(range(row.pp * row.virtual))


@needs_namespace
def test_bytes_in_an_own_network():
    home = os.readlink("/proc/self/ns/net")
    with network.own_network():
        before = network.sent_bytes(os.getpid())
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname()) as client,
            server.accept()[0] as taken,
        ):
            client.sendall(bytes(100_000))
            received = 0
            while received < 100_000:
                received += len(taken.recv(1 << 16))
        assert 100_000 <= network.sent_bytes(os.getpid()) - before < 110_000
    assert os.readlink("/proc/self/ns/net") == home


@pytest.mark.timeout(200)
def test_a_failing_rank_is_named_with_its_log(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)  # for the rank
    missing = str(tmp_path / "no" / "such" / "weights.pt")
    ranks = job.Ranks([("serve", rows.Contestant("torch", "torch_side"), ONE, rows.TINY, missing)], tmp_path / "log")
    with pytest.raises(job.JobError, match="rank 0: FileNotFoundError") as caught:
        ranks.answers(180)
    assert "serialization.py" in str(caught.value)
    assert not any(process.is_alive() for process in ranks.processes)


@pytest.mark.timeout(200)
def test_ranks_are_stopped_between_commands(tmp_path, monkeypatch, weights):
    monkeypatch.syspath_prepend(TOOLS)  # for the rank
    with job.Job(rows.MEGALITE, ONE, rows.TINY, weights=weights, logs=tmp_path, counted=False) as running:
        assert state(running.ranks.pid) == "T"
        assert len(running.run(0, 1).losses) == 1
        assert state(running.ranks.pid) == "T"
        ranks = running.ranks.processes
    assert all(process.exitcode == 0 for process in ranks)


@pytest.mark.timeout(200)
def test_stopped_ranks_are_ended_when_the_tool_fails(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)  # for the rank
    call = ("write_weights", rows.TINY, str(tmp_path / "weights.pt"))
    ranks = job.Ranks([call], tmp_path / "log")
    ranks.answers(180)
    assert state(ranks.pid) == "T"
    with pytest.raises(ZeroDivisionError):
        fail_beside(ranks)
    assert [process.exitcode for process in ranks.processes] == [-9]


def fail_beside(ranks):
    """What a tool's own error does to the ranks of its `with`."""
    with ranks:
        raise ZeroDivisionError


def state(pid):
    """T: stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def test_a_failed_row_does_not_stop_the_others(tmp_path, monkeypatch):
    def fails(row, jobs, work, effort):
        if row.world_size == 1:
            return [result("one", job.contestant.label, ours=job.contestant.ours) for job in jobs]
        raise job.JobError("rank 1 ended")

    monkeypatch.setattr(measure, "measure_row", fails)
    monkeypatch.setattr(measure, "prepare_weights", lambda work, path: None)
    monkeypatch.setattr(measure, "find_spec", lambda name: None)
    chosen = rows.selected(["dp2-zero3"])
    found = measure.measure(chosen, rows.TINY, effort=EFFORT, folder=tmp_path, say=lambda text: None)
    assert [r.label for r in found.results] == ["megalite", "torch"]
    assert found.failed == ["dp2-zero3: rank 1 ended"]
    assert "DeepSpeed is not installed" in " ".join(found.notes)
    where = tables.machine()
    text = tables.report(chosen, found, work=rows.TINY, effort=EFFORT, where=where, markdown=True)
    assert "FAILED dp2-zero3: rank 1 ended" in text


def result(row, label, *, ours=False, **changes):
    """A line of the table."""
    values = {
        "tokens_per_s": 100.0,
        "cpu_s": 2.0,
        "wire_bytes": None,
        "peak_rss_bytes": (10**8, 10**8),
        "losses": [1.0, 2.0],
        "block_s": [1.0, 1.0],
        "block_cpu_s": [2.0, 2.2],
    }
    return measure.Result(row=row, label=label, ours=ours, **(values | changes))


def test_ratios_above_one_are_in_our_favour():
    row = replace(ONE, name="r")
    found = measure.Measured(
        results=[
            result("r", "megalite", ours=True, wire_bytes=100.0, block_s=[1.0, 2.0, 1.0]),
            result("r", "fast", tokens_per_s=120.0, wire_bytes=150.0, block_s=[1.5, 2.0, 3.0], cpu_s=3.0),
            result("r", "slow", tokens_per_s=90.0, wire_bytes=None, cpu_s=1.0, peak_rss_bytes=(1, 3 * 10**8)),
        ]
    )
    table = tables.ratios([row], found)[0]
    assert table["tokens_per_s"] == {"ratio": 1.5, "best": "fast"}  # rounds: 1.5, 1, 3
    assert table["gloo_tokens_per_s"]["ratio"] == 1.5  # all of it was on the wire
    assert table["cpu_s"] == {"ratio": 0.5, "best": "slow"}
    assert table["wire_bytes"] == {"ratio": 1.5, "best": "fast"}
    assert table["rss"] == {"ratio": 1.0, "best": "fast"}
    assert measure.difference([1.0, 2.0], [1.0, 2.5]) == 0.5


def cube(**changes):
    """Results of one process and of 8 ranks, with shared memory and without."""
    ours = {"tokens_per_s": 180.0, "block_s": [0.5, 0.6], "block_cpu_s": [2.5, 2.75], "traffic": {"tp all_gather": 3e8}}
    return measure.Measured(
        results=[
            result("one", "megalite", ours=True),
            result("one", "torch"),
            result("2x2x2", "megalite", ours=True, **(ours | {"wire_bytes": 1e7} | changes)),
            result("2x2x2", "megalite on gloo", ours=True, **(ours | {"wire_bytes": 3.1e8, "block_s": [0.8, 0.8]})),
            result("2x2x2", "torch", wire_bytes=6e8),
            result("2x2x2", rows.ONE_PROCESS.label, tokens_per_s=300.0, peak_rss_bytes=(1, 1)),
            result("tp2", "megalite", ours=True, wire_bytes=1e6, traffic={"tp all_gather": 2.85e8}),
            result("tp2", "megalite on gloo", ours=True, wire_bytes=2.9e8, traffic={"tp all_gather": 2.85e8}),
            result("tp2", "torch", wire_bytes=4e8),
        ]
    )


def test_bytes_in_shared_memory_are_not_called_wire_bytes():
    chosen = rows.selected(["2x2x2"])
    table = {row["row"]: row for row in tables.ratios(chosen, cube())}
    assert table["2x2x2"]["wire_bytes"] == {"ratio": 6e8 / 3.1e8, "best": "torch"}
    assert table["2x2x2"]["tokens_per_s"]["ratio"] == pytest.approx((1 / 0.5 + 1 / 0.6) / 2)
    assert table["2x2x2"]["gloo_tokens_per_s"]["ratio"] == 1.25
    lines = {(line[0], line[1]): line for line in tables.lines_of(chosen, measure.Measured(cube().results[2:5]))}
    title = chosen[-1].title
    assert lines[title, "megalite"][4:6] == ("10.0 + shm", "300.0")
    assert lines[title, "megalite on gloo"][4:6] == ("310.0", "300.0")
    assert lines[title, "torch"][4:6] == ("600.0", "-")
    without = [r for r in cube().results if r.label != "megalite on gloo"]
    assert tables.ratios(chosen, measure.Measured(without))[1]["wire_bytes"]["ratio"] is None


def test_goals_are_judged():
    chosen = rows.selected(["tp2", "2x2x2"])

    def judged(found):
        return {(v.row, v.goal.split(" at ")[0]): v.holds for v in goals.verdicts(tables.ratios(chosen, found), found,
                                                                                   rows.Work())}  # fmt: skip

    assert judged(cube()) == {
        ("one", "tokens/s"): True, ("one", "peak RSS"): True, ("tp2", "tokens/s"): True, ("tp2", "peak RSS"): True,
        ("tp2", "wire bytes"): False, ("2x2x2", "tokens/s"): True, ("2x2x2", "peak RSS"): True,
        ("2x2x2", "CPU s"): True,
    }  # fmt: skip
    slow = judged(cube(block_s=[0.6, 0.6], block_cpu_s=[2.54, 2.82], peak_rss_bytes=(1, 10**9)))
    assert not any(slow["2x2x2", goal] for goal in ("tokens/s", "peak RSS", "CPU s"))
    assert goals.verdicts(tables.ratios(chosen, cube()), cube(), rows.TINY) == []
    report = tables.report(chosen, cube(), work=rows.Work(), effort=EFFORT, where=tables.machine(), markdown=False)
    assert "MISSED" in report


def test_one_process_beside_eight():
    row = rows.selected(["2x2x2"])[-1]
    alone = row.of(rows.ONE_PROCESS)
    assert alone == replace(ONE, name="2x2x2")
    assert [c.label for c in row.contestants].count(rows.ONE_PROCESS.label) == 1
    assert row.of(rows.MEGALITE) is row


def test_which_rows_run_on_gloo_too():
    twins = [row.name for row in rows.ROWS if rows.MEGALITE_GLOO in row.contestants]
    assert twins == ["dp2-zero1", "dp2-zero2", "dp2-zero3", "tp2", "2x2x2"]
    assert all(row.contestants[0] is rows.MEGALITE for row in rows.ROWS)
    assert megalite_side.config_of(rows.ROWS[1], rows.TINY, rows.MEGALITE_GLOO.variant).comm.cpu_backend == "gloo"


def test_an_unknown_row(capsys):
    assert bench_train.main(["--tiny", "--rows", "dp3"]) == 2
    assert "--rows dp3 is not a row; rows are one, dp2-zero1" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_whole_run(tmp_path):
    path, page = tmp_path / "found.json", tmp_path / "found.md"
    chosen = ["--rows", "dp2-zero1", "2x2x2", "--json", str(path), "--markdown", str(page)]
    tool = [sys.executable, str(ROOT / "tools" / "bench_train.py"), "--tiny", *chosen]
    done = subprocess.run(tool, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    results = {(r["row"], r["label"]): r for r in found["results"]}
    assert {row for row, _ in results} == {"one", "dp2-zero1", "2x2x2"}
    for line in results.values():
        assert line["loss_difference"] < 2e-6
        assert len(line["losses"]) == 3
    if network.available():
        num_bytes = (
            4 * 49_440
        )  # tiny's parameters: reduced and gathered, and hardly more; also the gather that overlaps
        assert 2 * num_bytes < results["dp2-zero1", "megalite on gloo"]["wire_bytes"] < 2.3 * num_bytes
    assert page.read_text().count("| one process |") == 3
    assert [row["row"] for row in found["ratios"]] == ["one", "dp2-zero1", "2x2x2"]


def test_a_report_is_printed_and_written_where_a_file_is_given(tmp_path, capsys):
    def report(*found, where, markdown):
        return f"{found} {where} {'page' if markdown else 'plain'}"

    def numbers(*found, where):
        return {where: found}

    page, path = tmp_path / "a.md", tmp_path / "a.json"
    bench_output.publish(report, numbers, of=(1, 2), about={"where": "here"}, markdown=None, json_file=None)
    assert capsys.readouterr().out == "(1, 2) here plain\n"
    assert list(tmp_path.iterdir()) == []
    bench_output.publish(report, numbers, of=(3,), about={"where": "here"}, markdown=page, json_file=path)
    assert capsys.readouterr().out == "(3,) here plain\n"
    assert page.read_text() == "(3,) here page\n"
    assert json.loads(path.read_text()) == {"here": [3]}


def test_progress_goes_to_stderr_with_the_seconds(capsys):
    bench_output.progress()("step 1")
    assert capsys.readouterr() == ("", "[   0 s] step 1\n")
