"""tools/gpu_check.py and tools/bench_kernels.py at toy sizes: every stage runs, and a stage that fails is reported."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megalite import native
from megalite.config.load import load_config
from megalite.observe.flops import layer_matmul_params
from megalite.train.report import model_shape

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
gpu_check, bench_adamw = __import__("gpu_check"), __import__("bench_adamw")
sys.path.remove(str(ROOT / "tools"))


def options(tmp_path, **changes):
    values = {"device": "cpu", "tiny": True, "out": tmp_path, "steps": 6, "skip": ()}
    return gpu_check.Options(**values | changes)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_gpu_check_on_a_cpu(tmp_path):
    arguments = ["--device", "cpu", "--tiny", "--out", str(tmp_path), "--skip", "build", "--steps", "6"]
    done = subprocess.run(
        [str(ROOT / "tools" / "gpu_check.sh"), *arguments], capture_output=True, text=True, timeout=220
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    stages = {stage["name"]: stage for stage in report["stages"]}
    assert list(stages) == ["doctor", "check", "symm", "bench", "train"]
    assert stages["train"]["numbers"]["steps"] == 6
    assert stages["train"]["numbers"]["last_loss"] < 6.0
    assert {row["name"] for row in stages["bench"]["numbers"]["rows"]} >= {"torch", "reference"}
    text = (tmp_path / "report.md").read_text()
    for words in ("| train | ok |", "measured ceilings", "peak_memory_gb", "swiglu", "2 ranks, 5 ops: ran"):
        assert words in text


def test_the_large_config_is_valid_and_about_a_billion(tmp_path):
    gpu_check.train(options(tmp_path, device="cuda", tiny=False))
    config = load_config(tmp_path / "train.yaml")
    assert config.world_size == 1
    shape = model_shape(config)
    num_params = shape.num_layers * layer_matmul_params(shape) + 2 * shape.vocab_size * shape.hidden_size
    assert 1.0e9 < num_params < 1.3e9


def test_the_build_is_the_installation_s_own(tmp_path):
    command = gpu_check.build(options(tmp_path))
    assert "--inplace" not in command
    assert str(tmp_path / "build") in command
    assert "--inplace" in gpu_check.build(options(tmp_path, tiny=False))


def test_a_failing_and_a_slow_stage(tmp_path, monkeypatch):
    def fails(_):
        return [sys.executable, "-c", "print('before'); raise SystemExit(3)"]

    def sleeps(_):
        return [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(30)"]

    def writes_nothing(_):
        return [sys.executable, "-c", "pass"]

    monkeypatch.setattr(
        gpu_check, "STAGES", {"fails": (fails, 20), "sleeps": (sleeps, 2), "bench": (writes_nothing, 20)}
    )
    failed = gpu_check.run_stage("fails", options(tmp_path), 60.0)
    assert (failed.ok, failed.output) == (False, "before\n")
    slow = gpu_check.run_stage("sleeps", options(tmp_path), 60.0)
    assert not slow.ok
    assert "begun" in slow.output
    assert "stopped after 2 s" in slow.output
    silent = gpu_check.run_stage("bench", options(tmp_path), 60.0)
    assert not silent.ok
    assert "its numbers can't be read" in silent.output
    assert "| fails | FAILED |" in gpu_check.markdown([failed, slow], {"date": "d", "card": "c"})


@pytest.mark.timeout(200)
def test_bench_kernels(tmp_path):
    path = tmp_path / "rows.json"
    tool = [sys.executable, str(ROOT / "tools" / "bench_kernels.py"), "--tiny", "--rounds", "1", "--json", str(path)]
    done = subprocess.run(tool, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    names = " ".join(row["name"] for row in json.loads(path.read_text()))
    for words in ("adamw", "linear_ce 8x16x64 time", "linear_ce 8x16x64 peak memory", "step 1x32"):
        assert words in names
    assert subprocess.run([*tool, "nonsense"], capture_output=True, timeout=60).returncode == 2


def test_bench_adamw_beside_deepspeed(monkeypatch):
    """With a stand-in that does what DeepSpeed's optimizer does: steps on a parameter and its gradient."""
    if native.load() is None:
        pytest.skip(f"not built: {native.why_missing()}")
    made = []

    def adam(params, **options):
        made.append((params[0], torch.optim.AdamW(params, **options)))
        return made[0][1]

    monkeypatch.setitem(sys.modules, "deepspeed.ops.adam", SimpleNamespace(DeepSpeedCPUAdam=adam))
    monkeypatch.setitem(sys.modules, "deepspeed.ops", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace())
    rows = {row.name: row for row in bench_adamw.rows(elements=1000, rounds=1, deepspeed=True)}
    param, optimizer = made[0]
    assert optimizer.state[param]["step"] == 4  # two rounds of the bare update and two of the whole one
    assert [row.deepspeed_s is not None for row in rows.values()] == [True, True, False]
    assert all("DeepSpeed" in rows[name].text() for name in (bench_adamw.BARE, bench_adamw.FULL))
    assert "DeepSpeed" not in rows["gradient norm in fp64"].text()
    assert all(row.deepspeed_s is None for row in bench_adamw.rows(elements=1000, rounds=1))
