"""What a user may get wrong: exit code 2, one message with the field and a way out, no traceback, before step 1."""

import signal
import subprocess
import sys

import pytest

from megalite.cli import main
from megalite.train.signals import STOP_SIGNALS

CONFIG = """
model: {family: llama, num_layers: 2, hidden_size: 32, num_heads: 4, num_kv_heads: 2, ffn_size: 48, vocab_size: 257,
        max_seq_len: 16}
batch: {global_batch_size: 4, micro_batch_size: 2, seq_len: 16}
precision: {compute: fp32}
lr: {peak: 1e-3}
data: {train: [{path: data/docs}], split: [90, 10, 0]}
run: {dir: runs/x, steps: 2, eval_batches: 1}
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with a config and a small corpus."""
    monkeypatch.chdir(tmp_path)
    former = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "text.txt").write_text("A small text, but not a short one. " * 200)
    assert main(["data", "prepare", "text.txt", "--tokenizer", "byte", "--output", "data/docs", "--workers", "1"]) == 0
    yield tmp_path
    for number, handler in former.items():
        signal.signal(number, handler)


GPT = ["model.family=gpt", "model.num_kv_heads=4", "model.rope_scaling=null"]
CASES = {
    "heads": (["mesh.tp=3"], ["mesh.tp=3", "num_heads=4", "use 1, 2 or 4"]),
    "world size": (["mesh.dp=2"], ["pp 1 x dp 2 x tp 1 = 2 ranks, but the job has 1"]),
    "unknown key": (["optimizer.learning_rate=1"], ["optimizer.learning_rate is unknown"]),
    "misspelt section": (["zerro.stage=3"], ["zerro", "zero"]),
    "missing data": (["data.train=[{path: data/nothing}]"], ["data/nothing"]),
    "negative rate": (["lr.peak=-1"], ["lr.peak=-1"]),
    "microbatches": (
        ["pipeline={schedule: interleaved, virtual: 1}", "mesh.pp=2", "batch.micro_batch_size=4"],
        ["interleaved", "mesh.pp=2", "num_microbatches=1"],
    ),
    "vocab": (["model.vocab_size=200"], ["257", "200"]),
    "positions": ([*GPT, "batch.seq_len=32"], ["batch.seq_len=32", "max_seq_len=16"]),
    "no such checkpoint": (["checkpoint.resume=runs/none"], ["runs/none"]),
    "seq_len": (["batch.seq_len=4000", "model.max_seq_len=4000"], ["4000"]),
    "run folder": (["run.dir=text.txt/x"], ["run.dir=text.txt/x", "text.txt is not a folder that can be written to"]),
    "batch": (["batch.num_microbatches=3"], ["global_batch_size=4"]),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(here, capfd, name):
    overrides, words = CASES[name]
    assert main(["train", "c.yaml", *overrides]) == 2
    said = capfd.readouterr().err
    assert all(word in said for word in words), said
    assert said.count("error: ") == 1
    assert "Traceback" not in said
    assert not (here / "runs").exists()


def test_a_mistake_that_only_ranks_find_is_said_once_by_launch(here):
    """Two real ranks whose groups exist when they fail."""
    line = [sys.executable, "-m", "megalite", "launch", "c.yaml", "mesh.dp=2", "data.train=[{path: data/nothing}]"]
    made = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert made.returncode == 2, made.stderr
    assert made.stderr.count("data/nothing") == made.stderr.count("error: ") == 1
    assert "Traceback" not in made.stderr
    assert "SIG" not in made.stderr


@pytest.mark.parametrize("content", [b"\xff\xfe\x00junk", b"model: [", b"", b"- 1\n"])
def test_unreadable_config(here, capfd, content):
    (here / "bad.yaml").write_bytes(content)
    assert main(["train", "bad.yaml"]) == 2
    said = capfd.readouterr().err
    assert "bad.yaml" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_corrupted_checkpoint(here, capfd, damage):
    assert main(["train", "c.yaml"]) == 0
    (file,) = (here / "runs/x/checkpoints/step_00000002").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content if damage == "flip" else content[: len(content) // 2])
    capfd.readouterr()
    assert main(["train", "c.yaml", "run.steps=4", "checkpoint.resume=runs/x/checkpoints/step_00000002"]) == 2
    said = capfd.readouterr().err
    assert "safetensors" in said
    assert "Traceback" not in said
