"""Which checkpoint a run resumes from, which are deleted, and what the checkpoint commands say."""

import re
import shutil

import pytest

from megalite.checkpoint.command import inspect, verify
from megalite.checkpoint.keep import latest, resolve
from megalite.checkpoint.manifest import MANIFEST, CheckpointError
from megalite.checkpoint.save import save
from tests.unit.checkpoint_cases import ALONE, joined, random_tensors, save_alone, shards

TENSORS = random_tensors(1)


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_keep_last_counts_complete_ones_and_spares_foreign_directories(tmp_path):
    for step in (1, 2):
        save_alone(tmp_path, step, TENSORS)
    (tmp_path / "step_00000003").mkdir()  # incomplete: not counted, not ours to delete
    (tmp_path / "step_final").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    for step in (4, 5):
        save_alone(tmp_path, step, TENSORS, keep_last=2)
    assert names(tmp_path) == ["notes.txt", "step_00000003", "step_00000004", "step_00000005", "step_final"]
    save_alone(tmp_path, 6, TENSORS, keep_last=1)
    assert latest(tmp_path).name == "step_00000006"
    assert "step_00000005" not in names(tmp_path)


def test_steps_are_compared_as_numbers(tmp_path):
    for step in (99_999_999, 100_000_000):
        save_alone(tmp_path, step, TENSORS, keep_last=2)
    assert latest(tmp_path).name == "step_100000000"
    save_alone(tmp_path, 100_000_001, TENSORS, keep_last=2)
    assert names(tmp_path) == ["step_100000000", "step_100000001"]


def test_later_steps_of_an_abandoned_run_are_set_aside(tmp_path, caplog):
    """After going back to step 10, a crash at 25 must not resume from the abandoned 30."""
    for step in (10, 20, 30):
        save_alone(tmp_path, step, TENSORS, keep_last=3)
    with caplog.at_level("WARNING", logger="megalite"):
        save_alone(tmp_path, 20, random_tensors(2), keep_last=3)
    assert latest(tmp_path).name == "step_00000020"
    assert names(tmp_path) == ["step_00000010", "step_00000020", "superseded_step_00000030"]
    assert "abandoned" in caplog.text
    verify(tmp_path / "superseded_step_00000030")


def test_saving_a_step_again_replaces_it_also_after_a_death(tmp_path):
    path = save_alone(tmp_path, 10, TENSORS)
    shutil.copytree(path, tmp_path / ".old-step_00000010")  # died after the new one was renamed
    (tmp_path / ".tmp-step_00000010").mkdir()
    save_alone(tmp_path, 10, random_tensors(2))
    assert names(tmp_path) == ["step_00000010"]
    path.rename(tmp_path / ".old-step_00000010")  # died between the two renames
    assert latest(tmp_path).name == ".old-step_00000010"
    save_alone(tmp_path, 20, TENSORS)
    assert names(tmp_path) == ["step_00000010", "step_00000020"]


def test_resolve(tmp_path):
    assert resolve("auto", tmp_path / "none yet") is None
    path = save_alone(tmp_path, 10, TENSORS)
    assert resolve("auto", tmp_path) == path
    assert resolve("none", tmp_path) is None
    assert resolve(str(path), tmp_path / "elsewhere") == path
    with pytest.raises(ValueError, match=f"not a complete checkpoint.*did you mean {re.escape(str(path))}"):
        resolve(str(tmp_path), tmp_path)
    with pytest.raises(ValueError, match="checkpoint.resume=nowhere is not a directory; use auto, none or"):
        resolve("nowhere", tmp_path)
    (path / "rank_00000.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="truncated"):
        resolve(str(path), tmp_path)


def test_inspect(tmp_path):
    config = {"mesh": {"pp": 2, "dp": 1, "tp": 2}, "zero": {"stage": 3}, "model": {"family": "llama", "num_layers": 12}}
    meta = {"config": config, "samples": 480, "cursor": {"step": 30, "tokens": 99}}
    state = joined(shards(TENSORS, tp=2, dp=2))
    path = save(tmp_path / "checkpoints", 30, state, group=ALONE, owner=True, meta=meta)
    for given in (path, tmp_path / "checkpoints", tmp_path):
        text = inspect(given)
        assert str(path) in text
    for line in (
        "step        30",
        "parameters  768 in 9 tensors",
        "state       exp_avg (float32), exp_avg_sq (float32), main (float32)",
        "saved under pp 2  dp 1  tp 2  ZeRO-3",
        "model       family llama  num_layers 12",
        "samples     480",
        "cursor      step 30  tokens 99",
    ):
        assert line in text.splitlines()
    assert re.search(r"embedding\.word\.weight +\(11, 8\) +\d box", text)
    assert "layers.0" not in inspect(path, list_tensors=False)


def test_verify_says_whole_or_raises(tmp_path):
    path = save_alone(tmp_path, 3, TENSORS, tp=2)
    assert re.search(r"is whole: step 3, 1 files, \d+ boxes, 0\.0\d MB, all hashes fit", verify(path))
    file = path / "rank_00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="corrupted"):
        verify(tmp_path)
    (path / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="holds no complete checkpoint; give a step_"):
        verify(tmp_path)
