"""A whole run through the trainer's main: losses of any layout, and a resume under any other one."""

import itertools
from pathlib import Path

import pytest

from megalite.config.load import load_config
from megalite.mesh import single_device_mesh
from megalite.observe.metrics import STEP_KEYS, read_metrics
from megalite.train.build import sizes_of
from megalite.train.main import train
from megalite.train.signals import StopFlag
from tests.dist.pool import mesh_for, run_ranks

CONFIG = """
model: {family: llama, num_layers: 4, hidden_size: 32, num_heads: 4, num_kv_heads: 2, ffn_size: 48, vocab_size: 257,
        max_seq_len: 16}
batch: {global_batch_size: 8, micro_batch_size: 1, seq_len: 16}
precision: {compute: fp64}
lr: {peak: 1e-2, schedule: cosine, warmup_steps: 2, decay_steps: 6}
data: {train: [{path: docs}], split: [90, 10, 0]}
checkpoint: {every_steps: 3}
"""
CUBE = ["mesh={pp: 2, dp: 2, tp: 2}", "pipeline={schedule: interleaved, virtual: 2}", "zero.stage=3"]
FLAT = ["mesh={pp: 2, dp: 2, tp: 1}", "zero.stage=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from megalite.data.prepare import prepare

    folder = tmp_path_factory.mktemp("run")
    (folder / "c.yaml").write_text(CONFIG)
    (folder / "text.txt").write_text("".join(f"{i * i} is the square of {i}.\n" for i in range(400)))
    prepare([str(folder / "text.txt")], tokenizer="byte", output=str(folder / "docs"), workers=1)
    return folder


def run_rank(rank, world, folder, name, overrides):
    """One rank of a run; returns the exit code."""
    fixed = [f"run.dir={folder}/{name}", f"data.train=[{{path: {folder}/docs}}]"]
    config = load_config(f"{folder}/c.yaml", [*fixed, *overrides])
    sizes = sizes_of(config)
    mesh = mesh_for(sizes, config.kv_replicas) if world > 1 else single_device_mesh()
    return train(config, mesh, StopFlag())


def run(world, folder, name, *overrides):
    """All ranks; returns the metrics."""
    assert set(run_ranks(world, run_rank, str(folder), name, list(overrides), timeout_s=100)) == {0}
    return read_metrics(Path(folder) / name / "metrics.jsonl")


def losses(records):
    return {r["step"]: r["loss"] for r in records if "loss" in r}


def test_resume_under_other_layouts(folder):
    """Steps 4 to 6 equal those of runs that were never interrupted, whatever the layout before and after step 3."""
    whole = losses(run(1, folder, "whole", "run.steps=6"))
    first = losses(run(8, folder, "cube", *CUBE, "run.steps=3"))
    assert list(whole) == [1, 2, 3, 4, 5, 6]
    assert first == pytest.approx({s: whole[s] for s in (1, 2, 3)}, rel=1e-10)
    source = f"checkpoint.resume={folder}/cube/checkpoints/step_00000003"
    for world, name, overrides in ((4, "flat", FLAT), (1, "one", [])):
        later = losses(run(world, folder, name, *overrides, "run.steps=6", source))
        assert later == pytest.approx({s: whole[s] for s in (4, 5, 6)}, rel=1e-10)
    again = run(8, folder, "cube", *CUBE, "run.steps=6")  # resume: auto, in place
    assert losses(again) == pytest.approx(whole, rel=1e-10)
    assert len({r["step"] for r in again if "loss" in r}) == 6


def test_what_a_run_writes(folder):
    records = run(2, folder, "files", "mesh.dp=2", "run.steps=4", "run.eval_every=2", "run.eval_batches=1")
    steps = [r for r in records if "loss" in r]
    assert [set(r) for r in steps] == [set(STEP_KEYS)] * 4
    assert [r["tokens"] for r in steps] == [8 * 16 * s for s in (1, 2, 3, 4)]
    assert [r["step"] for r in records if "eval_loss" in r] == [2, 4]
    assert all(r["tokens_per_s"] * r["step_time_s"] == pytest.approx(8 * 16) for r in steps)
    directory = Path(folder) / "files"
    assert sorted(p.name for p in directory.iterdir()) == ["checkpoints", "config.yaml", "loss.png", "metrics.jsonl"]
    assert sorted(p.name for p in (directory / "checkpoints").iterdir()) == ["step_00000003", "step_00000004"]
    assert load_config(str(directory / "config.yaml"), []).mesh.dp == 2


def test_a_stop_saves_and_a_later_start_goes_on(folder):
    whole = losses(run(1, folder, "unbroken", "run.steps=5", "lr.decay_steps=5"))
    codes = run_ranks(2, stopped_rank, str(folder), ["mesh.tp=2", "run.steps=5", "lr.decay_steps=5"])
    assert codes == [3, 3]
    assert [r["step"] for r in read_metrics(Path(folder) / "stopped" / "metrics.jsonl") if "loss" in r] == [1, 2]
    assert losses(run(2, folder, "stopped", "mesh.tp=2", "run.steps=5", "lr.decay_steps=5")) == pytest.approx(
        whole, rel=1e-10
    )


class StopAtSecondLook(StopFlag):
    """Asks for a stop in step 2, on one rank only."""

    def __init__(self):
        self.looks = itertools.count(1)

    @property
    def requested(self):
        return next(self.looks) == 2


def stopped_rank(rank, world, folder, overrides):
    fixed = [f"run.dir={folder}/stopped", f"data.train=[{{path: {folder}/docs}}]"]
    config = load_config(f"{folder}/c.yaml", [*fixed, *overrides])
    return train(config, mesh_for(sizes_of(config), 1), StopAtSecondLook() if rank == 1 else StopFlag())
