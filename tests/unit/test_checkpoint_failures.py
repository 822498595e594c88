"""What can go wrong with a checkpoint: deaths while saving, damaged files, foreign code, a state that is not whole."""

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megalite.checkpoint import manifest as manifest_module
from megalite.checkpoint.keep import latest
from megalite.checkpoint.load import load
from megalite.checkpoint.manifest import MANIFEST, CheckpointError
from megalite.checkpoint.save import SaveError, save
from tests.unit.checkpoint_cases import ALONE, joined, random_tensors, save_alone, shards

TENSORS = random_tensors(1)


def fresh():
    return shards(random_tensors(2), tp=1, dp=1)[0].state


@pytest.mark.parametrize("mode", ["first", "again"])
def test_death_at_any_point_leaves_a_loadable_checkpoint(tmp_path, mode):
    """Invariant 6. Every file system event of a save is tried, and the middle of every fourth write."""
    command = [sys.executable, "-m", "tests.unit.checkpoint_deaths", str(tmp_path), mode]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    deaths = [json.loads(line) for line in done.stdout.splitlines()]
    events = [death["event"] and death["event"][0] for death in deaths]
    assert len(deaths) > 30
    assert {"open", "os.rename", "os.mkdir", "write", None} <= set(events)
    new = {"first": 30, "again": 20}[mode]
    for death in deaths:
        assert death["right"], death
        assert death["step"] in (20, new), death
        assert death["left"] == [f"step_{death['step']:08d}", "step_00000040"], death  # one more save cleans up
    assert deaths[-1]["event"] is None
    assert deaths[-1]["step"] == new


@pytest.mark.parametrize("where", [0.1, 0.5, 0.999])
def test_a_changed_byte_is_found(tmp_path, where):
    path = save_alone(tmp_path, 1, TENSORS)
    file = path / "rank_00000.safetensors"
    data = bytearray(file.read_bytes())
    data[int(where * len(data))] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors is corrupted"):
        load(path, fresh())


def test_a_truncated_or_missing_file_is_found(tmp_path):
    path = save_alone(tmp_path, 1, TENSORS)
    file = path / "rank_00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors is truncated or changed: \d+ of \d+ bytes"):
        load(path, fresh(), verify=False)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors is missing"):
        load(path, fresh(), verify=False)


def test_a_bad_manifest_is_found(tmp_path, monkeypatch):
    path = save_alone(tmp_path, 1, TENSORS)
    text = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text(text[: len(text) // 2])
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        load(path, fresh())
    (path / MANIFEST).write_text(text.replace('"step": 1', '"step": 2'))
    with pytest.raises(CheckpointError, match="does not fit its digest"):
        load(path, fresh())
    (path / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"is not a complete checkpoint: it has no manifest\.json"):
        load(path, fresh())
    monkeypatch.setattr(manifest_module, "FORMAT_VERSION", 99)
    newer = save_alone(tmp_path, 2, TENSORS)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="format_version 99, this megalite reads 1"):
        load(newer, fresh())


def test_manifest_can_not_point_elsewhere(tmp_path):
    path = save_alone(tmp_path, 1, TENSORS)
    manifest = manifest_module.read_manifest(path)
    manifest.files["../../secret.safetensors"] = manifest.files["rank_00000.safetensors"]
    manifest_module.write_manifest(path, manifest)
    with pytest.raises(CheckpointError, match="not a plain .safetensors name"):
        load(path, fresh())


class Evil:
    """Unpickling this creates a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (open, (str(self.target), "w"))


def test_nothing_is_unpickled(tmp_path):
    """C16: a pickle in the place of each file is refused, also without the hash check, and never run."""
    target = tmp_path / "executed"
    for name in ("rank_00000.safetensors", MANIFEST):
        path = save_alone(tmp_path, 1, TENSORS)
        evil = pickle.dumps(Evil(target))
        size = (path / name).stat().st_size
        (path / name).write_bytes(evil + b"\0" * (size - len(evil)))
        (path / "extra.pt").write_bytes(evil)
        for verify in (True, False):
            with pytest.raises(ValueError, match=name.replace(".", r"\.")):
                load(path, fresh(), verify=verify)
        shutil.rmtree(path)
    assert not target.exists()
    pickle.loads(evil)
    assert target.exists()  # the pickle was a live one


def test_half_written_newest_is_skipped(tmp_path, caplog):
    """C09, C10: the newest whole one is taken, by number; the log says what was skipped."""
    good = save_alone(tmp_path, 9, TENSORS)
    for step, harm in [(10, "empty"), (11, "truncated"), (12, "no manifest"), (13, "renamed")]:
        path = save_alone(tmp_path / "other", step, TENSORS)
        file = path / "rank_00000.safetensors"
        if harm == "empty":
            file.write_bytes(b"")
        elif harm == "truncated":
            file.write_bytes(file.read_bytes()[:100])
        elif harm == "no manifest":
            (path / MANIFEST).unlink()
        shutil.move(path, tmp_path / ("step_00000099" if harm == "renamed" else path.name))
    shutil.rmtree(tmp_path / "other")
    (tmp_path / "step_00000050").mkdir()
    with caplog.at_level("WARNING", logger="megalite"):
        assert latest(tmp_path) == good
    assert caplog.text.count("skipped") == 5
    assert "step_00000099 holds step 13" in caplog.text


def test_missing_or_double_elements_are_not_saved(tmp_path):
    state = joined(shards(TENSORS, tp=2, dp=1))
    less = {kind: pieces[:-1] for kind, pieces in state.items()}
    with pytest.raises(SaveError, match=r"not whole: exp_avg of layers\.0\.mlp\.down\.weight .* is missing"):
        save(tmp_path, 1, less, group=ALONE, owner=True, meta={})
    more = {kind: [*pieces, pieces[-1]] for kind, pieces in state.items()}
    with pytest.raises(SaveError, match="given twice"):
        save(tmp_path, 1, more, group=ALONE, owner=True, meta={})
    with pytest.raises(SaveError, match="exp_avg and main hold different tensors"):
        save(tmp_path, 1, state | {"exp_avg": state["exp_avg"][1:2]}, group=ALONE, owner=True, meta={})
    assert list(tmp_path.iterdir()) == []


def test_state_that_is_not_finite_is_not_saved(tmp_path):
    """O09: a diverged state never displaces a good checkpoint."""
    good = save_alone(tmp_path, 10, TENSORS, keep_last=1)
    state = joined(shards(TENSORS, tp=1, dp=1))
    state["exp_avg"][2].data[3] = float("nan")
    with pytest.raises(SaveError, match="exp_avg of .* not finite"):
        save(tmp_path, 15, state, group=ALONE, owner=True, meta={}, keep_last=1)
    assert latest(tmp_path) == good
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000010"]


def test_full_disk_leaves_former_checkpoints(tmp_path, monkeypatch):
    good = save_alone(tmp_path, 10, TENSORS, keep_last=1)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    for name in ("write_tensors", "write_manifest", "fsync_directory"):
        with monkeypatch.context() as patch:
            patch.setattr(f"megalite.checkpoint.save.{name}", full)
            with pytest.raises(SaveError, match=r"former ones are intact:\n.*No space left on device"):
                save_alone(tmp_path, 20, TENSORS, keep_last=1)
        assert latest(tmp_path) == good
        load(good, fresh())
        assert [p.name for p in tmp_path.iterdir()] == ["step_00000010"]


def test_a_wrong_key_in_a_file_is_reported(tmp_path):
    path = save_alone(tmp_path, 1, TENSORS)
    manifest = manifest_module.read_manifest(path)
    file = path / "rank_00000.safetensors"
    save_file({"other": torch.zeros(3)}, file)
    manifest.files[file.name] = manifest_module.FileEntry(file.stat().st_size, "")
    manifest_module.write_manifest(path, manifest)
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors can't be read: main/"):
        load(path, fresh(), verify=False)
