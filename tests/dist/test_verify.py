"""`megalite verify` from the command to its ranks, and the comparison of copies at run time."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from megalite.cli import main
from megalite.config.load import check
from megalite.train.build import Trainer, build, sizes_of
from megalite.train.replicas import ReplicaError, check_replicas
from megalite.verify import processes
from megalite.verify.main import verify
from megalite.verify.processes import ChildrenError, run_children
from tests.dist.layouts import BASE, with_overrides
from tests.dist.pool import mesh_for, run_ranks
from tests.mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]


def verified(overrides: str) -> tuple[int, str]:
    """Exit code and output of verify, whose ranks are forked from this process with whatever is patched in it."""
    text = io.StringIO()
    config = check(with_overrides(BASE, overrides), {}, name="test")
    return verify(config, Console(file=text, width=200)), text.getvalue()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_command_accepts_llama3_70b():
    made = subprocess.run(
        [sys.executable, "-m", "megalite", "verify", "configs/llama3_70b.yaml"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    assert "verifying tp 2 x pp 2 (interleaved, 5 chunks) x dp 2 (ZeRO-1) on 8 CPU ranks" in made.stdout
    assert "mesh: pp 4 -> 2, dp 16 -> 2, tp 8 -> 2" in made.stdout
    assert made.stdout.splitlines()[-1] == "OK: the layout trains as one device does"


@pytest.mark.parametrize("code", [0, 1])
def test_the_command_passes_the_config_and_the_exit_code_on(code, monkeypatch):
    seen = []
    monkeypatch.setattr("megalite.verify.main.verify", lambda config: seen.append(config) or code)
    assert main(["verify", "gpt_tiny_cpu", "optimizer.clip_norm=0.5"]) == code
    assert seen[0].optimizer.clip_norm == 0.5


def test_reductions_in_bf16_have_their_own_bound():
    code, text = verified("mesh.dp=2 zero.stage=2 model.num_layers=2 precision.compute=bf16 precision.reduce=bf16")
    assert code == 0, text
    worst = {dtype: float(error) for dtype, error in re.findall(r"(fp\d\d) +gradient +\d+ +(\S+)", text)}
    assert worst["fp64"] < 1e-13
    assert worst["fp32"] > 1e-4, "gradients were not reduced in bf16"


def test_a_fault_is_named_with_layer_stage_and_rank():
    with MUTANTS["kv-grads-not-reduced-over-replicas"].apply():
        code, text = verified("mesh.tp=2 model.num_layers=2 model.num_kv_heads=1")
    assert code == 1
    assert re.search(
        r"fp64: first difference: gradient of layers.1.attention.k.weight \(layer 1, stage 0\) of step 1 differs by "
        r"\S+ relative; rounding explains \S+; worst at \[\d+, \d+\], held by rank 0 \(tp 0\)",
        text,
    ), text
    assert text.splitlines()[-1] == "FAILED: the layout does not train as one device does"


def test_a_rank_that_raises_is_reported(monkeypatch):
    original = processes.run_rank

    def run_rank(config, mesh, **options):
        if mesh.rank == 1:
            raise RuntimeError("planted on rank 1")
        return original(config, mesh, **options)

    monkeypatch.setattr(processes, "run_rank", run_rank)
    code, text = verified("mesh.dp=2 model.num_layers=2")
    assert code == 1
    assert "rank 1 failed:\nTraceback" in text
    assert "RuntimeError: planted on rank 1" in text
    assert text.splitlines()[-1] == "FAILED: the layout does not run"


def test_children_give_results_and_progress():
    heard = []
    works = {"a": lambda say: say("first") or 1, "b": lambda say: torch.ones(2)}
    results = run_children(works, limit_s=60.0, heard=lambda *what: heard.append(what))
    assert results["a"] == 1
    assert torch.equal(results["b"], torch.ones(2))
    assert heard == [("a", "first")]


def test_a_child_that_hangs_or_dies_is_reported_and_ended(monkeypatch):
    monkeypatch.setattr(processes, "GRACE_S", 0.2)

    def hang(say):
        say(f"step 7 as {os.getpid()}")
        time.sleep(600)

    with pytest.raises(ChildrenError) as caught:
        run_children({"rank 0": hang}, limit_s=2.0, heard=lambda *what: None)
    found = re.fullmatch(r"did not finish within 2 s; the last .* 'step 7 as (\d+)'", caught.value.texts["rank 0"])
    assert found
    assert not Path(f"/proc/{found[1]}").exists()

    def die(say):
        say("build")
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(ChildrenError) as caught:
        run_children({"rank 0": hang, "rank 1": die}, limit_s=60.0, heard=lambda *what: None)
    assert caught.value.texts["rank 1"] == "failed:\ndied of SIGKILL after it began 'build'"
    assert caught.value.texts["rank 0"].startswith("was waiting")


COPIES = {
    "tp": ("mesh.tp=2", "main", "layers.1.mlp_norm.weight", "main params of layers.1.mlp_norm.weight, over tp"),
    "tp-state": ("mesh.tp=2", "exp_avg", "final_norm.weight", "exp_avg of final_norm.weight, over tp"),
    "kv": ("mesh.tp=4", "main", "layers.0.attention.k.weight", "main params of layers.0.attention.k.weight, over kv"),
    "stage0": (
        "mesh.dp=2 zero.stage=0",
        "exp_avg_sq",
        "layers.0.mlp.up.weight",
        "exp_avg_sq of unit layers.0, over dp",
    ),
    "hsdp": (
        "mesh.dp.replicate=2 mesh.dp.shard=1 zero.stage=3",
        "main",
        "head.weight",
        "main params of unit head, over dp_replicate",
    ),
    "tied": (
        "mesh.pp=2 model.tie_embeddings=true",
        "main",
        "embedding.word.weight",
        "main params of embedding.word.weight, over tied",
    ),
    "gathered": ("mesh.dp=2 zero.stage=2", "full", "head.weight", "parameters of unit head, over dp_shard"),
}
"""Layout, what is changed on rank 1 and where, and what the message says."""


def corrupted(rank: int, world: int, case: str) -> str:
    """In a rank: the message of check_replicas after one bit of a copy changed on rank 1."""
    overrides, what, name, _ = COPIES[case]
    config = check(with_overrides(BASE, f"model.num_layers=2 {overrides}"), {}, name=case)
    trainer = build(config, mesh_for(sizes_of(config), kv_replicas=config.kv_replicas))
    check_replicas(trainer, 1)
    if rank == 1:
        change_a_bit(trainer, what, name)
    try:
        check_replicas(trainer, 2)
    except ReplicaError as error:
        return str(error)
    return ""


def change_a_bit(trainer: Trainer, what: str, name: str) -> None:
    """The smallest change of the first element that this rank holds of a logical tensor."""
    for unit in trainer.zero.units.values():
        for run in trainer.zero.runs(unit):
            if run.part.name == name:
                flat = {"main": unit.main, "full": unit.full, **_state(trainer, unit.name)}[what]
                at = 0 if what == "full" else run.shard_offset
                flat[at] = torch.nextafter(flat[at], torch.tensor(torch.inf, dtype=flat.dtype))
                return
    raise AssertionError(f"{name} is not on rank {trainer.mesh.rank}")


def _state(trainer: Trainer, unit: str) -> dict[str, torch.Tensor]:
    return {kind: tensors[unit] for kind, tensors in trainer.optimizer.state.items()}


@pytest.mark.parametrize("case", COPIES)
def test_a_copy_that_differs_by_one_bit_stops_all_ranks(case):
    world = 4 if case == "kv" else 2
    first, *others = run_ranks(world, corrupted, case)
    assert all(text == first for text in others)
    assert re.search(rf"after step 2 .*:\n  {re.escape(COPIES[case][3])}: rank 0 holds \w+, rank 1 holds \w+\n", first)
