"""metrics.jsonl, what a person sees of a run, the loss plot, the logger and the timers."""

import io
import json
import logging
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from megalite.observe import metrics
from megalite.observe.log import get_logger, setup_logging
from megalite.observe.metrics import STEP_KEYS, MetricsWriter, read_metrics, require_tensorboard
from megalite.observe.plot import plot_loss, smooth
from megalite.observe.progress import Progress, duration, summarize, summary_table
from megalite.observe.timers import Timers


def record(step: int, **changes) -> dict:
    values = {"step": step, "loss": 8.0 / step, "grad_norm": 1.0, "lr": 3e-4, "tokens": 64 * step, "samples": 4 * step}
    values |= {"skipped": False, "step_time_s": 0.5, "tokens_per_s": 128.0, "tflops_per_rank": 0.1}
    return values | {"mfu": None, "hfu": None, "memory_gb": 0.5, "comm_bytes": {"tp": 2_500_000, "dp": 10}} | changes


def write(path, steps, **keys):
    with MetricsWriter(path, **keys) as writer:
        for step in steps:
            writer.write_step(record(step))
            if step % 2 == 0:
                writer.write_eval({"step": step, "eval_loss": 9.0 / step})


def test_lines_have_the_contract_keys_and_round_trip(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    write(path, [1, 2])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [list(line) for line in lines] == [list(STEP_KEYS), list(STEP_KEYS), ["step", "eval_loss"]]
    assert read_metrics(path) == [record(1), record(2), {"step": 2, "eval_loss": 4.5}]
    with MetricsWriter(path, after_step=2) as writer:
        with pytest.raises(AssertionError, match="'hfu', 'extra'|'extra', 'hfu'"):
            writer.write_step({key: value for key, value in record(3, extra=1).items() if key != "hfu"})
        with pytest.raises(AssertionError, match="step and eval_loss"):
            writer.write_eval({"step": 3})


def test_resume_drops_later_lines_and_a_cut_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2, 3, 4])
    with path.open("a") as file:
        file.write('{"step": 5, "lo')
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 2, 3, 4, 4]
    write(path, [3, 4], after_step=2)
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 2, 3, 4, 4]
    write(path, [1])  # a new run in the same directory
    assert [line["step"] for line in read_metrics(path)] == [1]
    path.write_text('{"step": 1}\n{"step"\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read_metrics(path)


def test_values_that_are_not_finite_are_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write_step(record(1, loss=float("nan"), grad_norm=float("inf"), skipped=True))
    assert "NaN" not in path.read_text()
    assert (read_metrics(path)[0]["loss"], read_metrics(path)[0]["grad_norm"]) == (None, None)


def test_tensorboard_is_refused_at_the_start_when_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="run.tensorboard=true needs the package tensorboard"):
        require_tensorboard()
    with pytest.raises(ValueError, match="set run.tensorboard=false"):
        MetricsWriter(tmp_path / "m.jsonl", tensorboard_dir=tmp_path / "tb")


def test_tensorboard_gets_the_same_numbers(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write(tmp_path / "m.jsonl", [1, 2], tensorboard_dir=tmp_path / "tb")
    events = accumulator.EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 8.0), (2, 4.0)]
    assert [(e.step, e.value) for e in events.Scalars("eval/eval_loss")] == [(2, 4.5)]
    assert [e.value for e in events.Scalars("train/comm_bytes/tp")] == [2_500_000, 2_500_000]
    assert "train/mfu" not in events.Tags()["scalars"]


def shown(*, total: int, start: int = 0, every: int = 5, terminal: bool = False, skipped: int = 0) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=150)
    with Progress(total, start_step=start, every=every, console=console) as progress:
        for step in range(start + 1, total + 1):
            progress.step(record(step, skipped=step == skipped))
        progress.evaluation({"step": total, "eval_loss": 2.25})
    return console.file.getvalue()


def test_plain_lines_first_every_and_last():
    lines = shown(total=12, skipped=7).splitlines()
    assert [line.split("/")[0].split()[1] for line in lines[:-1]] == ["1", "5", "7", "10", "12"]
    assert lines[0] == "step  1/12  loss 8.0000  grad norm 1.000  lr 3.00e-04  128 tokens/s  eta 5.5s"
    assert lines[2].endswith("SKIPPED: gradients are not finite")
    assert lines[-1] == "step 12: eval loss 2.2500"
    assert shown(total=9, start=6).startswith("step 7/9")
    assert "\x1b" not in shown(total=3)


def test_terminal_gets_a_live_line_and_notes_stay():
    text = shown(total=12, terminal=True)
    assert "step 12/12" in text
    assert "eval loss 2.2500" in text
    assert "\x1b[?25h" in text  # the cursor is shown again


def test_live_display_ends_after_an_error():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with pytest.raises(KeyError, match="loss"), Progress(3, console=console) as progress:
        progress.step({"step": 1, "step_time_s": 1.0})
    assert console.file.getvalue().rstrip().endswith("\x1b[?25h")


def test_summary():
    records = [record(1, step_time_s=60.0, tokens_per_s=1.0), record(2), {"step": 2, "eval_loss": 4.5}, record(3)]
    figures = summarize(records)
    assert (figures["loss"], figures["eval_loss"], figures["tokens_per_s"]) == (8.0 / 3, 4.5, 128.0)
    assert (figures["train_time_s"], figures["tokens"], figures["steps"]) == (61.0, 192, 3)
    console = Console(file=io.StringIO(), width=100)
    console.print(summary_table(records, title="tp 2", paths={"plot": "runs/x/loss.png"}))
    text = console.file.getvalue()
    for part in ("tp 2", "2.6667", "4.5000", "1m01s", "2.50 MB", "runs/x/loss.png", "unknown hardware"):
        assert part in text
    console.print(summary_table([]))


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.24, "4.2s"), (59.99, "60.0s"), (185, "3m05s"), (7620, "2h07m"), (273600, "3d04h")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_plot_draws_every_run(tmp_path):
    records = [record(1, loss=None, skipped=True), record(2), record(3), {"step": 3, "eval_loss": 2.0}]
    for few in (records, records[1:2], records[3:]):
        path = plot_loss(few, tmp_path / "loss.png", title="tp 2")
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 8000
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_loss(records[:1], tmp_path / "no.png")


def test_smooth_is_centred():
    assert smooth([1.0, 2.0, 3.0, 4.0, 5.0], 2) == pytest.approx([1, 2, 3, 4, 5])  # a line stays: no lag
    assert smooth([0.0, 0.0, 3.0, 0.0, 0.0], 1) == pytest.approx([0, 1, 1, 1, 0])
    assert smooth([], 3) == []


def test_logger_speaks_on_rank_0_and_warns_elsewhere(capsys):
    logger, former = get_logger(), list(get_logger().handlers)
    try:
        setup_logging(0)
        setup_logging(0)
        logger.info("hello")
        setup_logging(3)
        logger.info("hidden")
        logger.warning("careful")
        out, err = capsys.readouterr()
    finally:
        logger.handlers, logger.propagate = former, True
        logger.setLevel(logging.NOTSET)
    assert out == ""
    assert err.count("hello") == 1
    assert "hidden" not in err
    assert "[rank 3] W careful" in err


def test_timers_add_up_spans_only(monkeypatch):
    """M03: what lies outside of a span, such as a save, is in no total."""
    now = SimpleNamespace(value=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: now.value)
    timers = Timers()
    for _ in range(2):
        with timers.span("step"):
            now.value += 1.0
            with timers.span("forward"):
                now.value += 0.25
        now.value += 100.0  # saving
    with pytest.raises(AttributeError), timers.span("failed"):
        now.fail()
    assert timers.take() == {"step": 2.5, "forward": 0.5, "failed": 0.0}
    assert timers.take() == {}
