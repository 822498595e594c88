"""Faults of whole runs: steps that are skipped, stops, resumes in the same and in another layout, what is logged.

The loop of `train/loop.py` runs on real ranks with batches made by step, writes its metrics and checkpoints, and is
compared with one rank, or with a run that nothing interrupted.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.batch import IGNORE, Microbatch
from megalite.checkpoint.load import Reader
from megalite.config.load import check
from megalite.optim.lr import learning_rate
from megalite.optim.norm import counted
from megalite.train.build import Trainer
from megalite.train.logical import gather_logical
from megalite.train.loop import MAX_SKIPPED, DivergedError, Loaders, run_loop
from megalite.train.report import Reporter
from megalite.train.signals import StopFlag
from megalite.train.state import load_state, save_state
from megalite.train.step import train_step
from tests.dist.fault_tools import assert_same, make_trainer, settings_of
from tests.dist.layouts import GPT, global_batch
from tests.dist.pool import run_ranks
from tests.dist.test_layouts import own_microbatches

COSINE = "lr.schedule=cosine lr.warmup_steps=2"
Moments = dict[str, dict[str, torch.Tensor]]


class Batches:
    """Stands for a Loader: this rank's microbatches of a step."""

    def __init__(self, trainer: Trainer, settings: dict[str, Any]):
        self.trainer, self.settings = trainer, settings

    def microbatches(self, step: int) -> list[Microbatch]:
        batch = global_batch(self.settings, "uneven", step)
        return own_microbatches(self.trainer.config, self.trainer.mesh.dp.rank, batch, step)


def poison(trainer: Trainer, steps: tuple[int, ...]) -> None:
    """Make the gradients of the last rank, and only its own, not finite in these steps."""
    run = trainer.runtime.run

    def poisoned(batches: list[Microbatch], *, loss_grad: float) -> list[torch.Tensor]:
        bad = batches[0].step in steps and trainer.mesh.rank == trainer.mesh.sizes.world - 1
        return run(batches, loss_grad=float("nan") if bad else loss_grad)

    trainer.runtime.run = poisoned


def state_of(trainer: Trainer) -> Moments:
    """Kind -> logical tensors, whole: main params and optimizer state."""
    return {kind: gather_logical(trainer, pieces) for kind, pieces in trainer.optimizer.pieces(counted).items()}


def loop(rank: int, world: int, settings: dict[str, Any], bad: tuple[int, ...], resume: str, stop_at: int = 0):
    """Run the loop on all ranks; (how it ended, updates made, state). `stop_at`: the last rank wants to stop then."""
    trainer = make_trainer(settings)
    poison(trainer, bad)
    start = load_state(trainer, Path(resume)) if resume else 0
    batches = Batches(trainer, settings)
    stop = StopFlag()
    if stop_at and rank == world - 1:
        microbatches = batches.microbatches

        def and_stop(step: int) -> list[Microbatch]:
            stop.requested = step >= stop_at
            return microbatches(step)

        batches.microbatches = and_stop
    reporter = Reporter(trainer.config, trainer.mesh, start=start) if rank == 0 else None
    try:
        ended = run_loop(trainer, Loaders(batches, None), reporter, start=start, stop=stop)
    except DivergedError as error:
        ended = str(error)
    if reporter:
        reporter.metrics.close()
    return ended, trainer.optimizer.step_count, state_of(trainer)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def same_bits(one: Moments, two: Moments) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[k][n], two[k][n]) for k in one for n in one[k])


LAYOUTS = {
    "pp2": (2, "mesh.pp=2 precision.compute=bf16"),
    "dp2-zero3": (2, "mesh.dp=2 zero.stage=3 precision.compute=bf16"),
    "tp2": (2, "mesh.tp=2"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_skipped_steps_and_resume(tmp_path, name):
    """O07, O09, C01, C03, C04, L12, M04: two of eight steps are not finite on one rank. All ranks skip them, the rate
    follows the step, nothing bad reaches the state, and a run that resumes after step 5 ends in the same bits."""
    world, layout = LAYOUTS[name]
    overrides = f"{layout} {COSINE} run.steps=8 checkpoint.every_steps=5 run.dir={tmp_path}/whole"
    whole = settings_of(overrides)
    results = run_ranks(world, loop, whole, (3, 7), "")
    lines = metrics(tmp_path / "whole")
    assert [line["skipped"] for line in lines] == [step in (3, 7) for step in range(1, 9)]
    assert [line["grad_norm"] is None for line in lines] == [line["skipped"] for line in lines]
    lr = check(whole, {}, name="fault").lr
    assert [line["lr"] for line in lines] == [learning_rate(lr, step, 8) for step in range(1, 9)]
    assert [line["tokens"] for line in lines] == [step * 8 * 16 for step in range(1, 9)]
    assert [line["samples"] for line in lines] == [step * 8 for step in range(1, 9)]
    for ended, updates, state in results:
        assert (ended, updates) == (True, 6)
        assert same_bits(state, results[0][2])
        assert all(torch.isfinite(value).all() for values in state.values() for value in values.values())
    resumed = whole | {"run": whole["run"] | {"dir": f"{tmp_path}/resumed"}}
    again = run_ranks(world, loop, resumed, (3, 7), str(tmp_path / "whole" / "checkpoints" / "step_00000005"))
    assert all(same_bits(state, results[0][2]) and updates == 6 for _, updates, state in again)
    keys = ("step", "loss", "grad_norm", "lr", "tokens", "samples", "skipped")
    rest = [{key: line[key] for key in keys} for line in lines[5:]]
    assert [{key: line[key] for key in keys} for line in metrics(tmp_path / "resumed")] == rest


def test_the_logged_loss_is_that_of_one_rank(tmp_path):
    """L12, M04: rank 0 logs a loss that only the last stage has; tokens do not count tp and pp ranks."""
    common = f"{COSINE} run.steps=5"
    run_ranks(1, loop, settings_of(f"{common} run.dir={tmp_path}/one"), (), "")
    run_ranks(4, loop, settings_of(f"{common} run.dir={tmp_path}/four mesh.pp=2 mesh.tp=2"), (), "")
    for one, four in zip(metrics(tmp_path / "one"), metrics(tmp_path / "four"), strict=True):
        for key in ("loss", "grad_norm", "lr", "tokens", "samples"):
            assert four[key] == pytest.approx(one[key], rel=1e-10), key


def test_one_rank_that_is_told_to_stop_stops_all(tmp_path):
    """R02, L12: a signal to one rank ends every rank after the same step, with the state saved."""
    settings = settings_of(f"mesh.pp=2 run.steps=6 run.dir={tmp_path}")
    results = run_ranks(2, loop, settings, (), "", 3)
    assert [(ended, updates) for ended, updates, _ in results] == [(False, 3)] * 2
    assert len(metrics(tmp_path)) == 3
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000003"]


def test_a_run_that_only_skips_ends_with_good_checkpoints(tmp_path):
    """O09: from step 4 on nothing is finite. The run ends by itself; what it saved meanwhile is the state of step 3."""
    steps = tuple(range(4, 40))
    settings = settings_of(
        f"mesh.dp=2 zero.stage=3 run.steps=40 checkpoint.every_steps=3 checkpoint.keep_last=2 run.dir={tmp_path}"
    )
    results = run_ranks(2, loop, settings, steps, "")
    for ended, updates, state in results:
        assert f"in the last {MAX_SKIPPED} steps, up to step {3 + MAX_SKIPPED}" in ended
        assert updates == 3
        assert same_bits(state, results[0][2])
    saved = sorted((tmp_path / "checkpoints").iterdir())
    assert [path.name for path in saved] == ["step_00000009", "step_00000012"]
    for path in saved:
        with Reader(path) as reader:
            for kind, tensors in results[0][2].items():
                assert all(torch.equal(reader.tensor(kind, name), value) for name, value in tensors.items())


def masked_steps(rank: int, world: int, settings: dict[str, Any], ignored: tuple[int, ...]) -> tuple:
    """One plain step, then one in which the dp ranks in `ignored` have no trained label."""
    trainer = make_trainer(settings)
    batches = Batches(trainer, settings)
    train_step(trainer, batches.microbatches(0), lr=0.1)
    before = state_of(trainer)
    own = batches.microbatches(1)
    full = settings["batch"]["global_batch_size"] // 2
    own = [
        replace(mb, labels=torch.full_like(mb.labels, IGNORE)) if mb.sample_start // full in ignored else mb
        for mb in own
    ]
    result = train_step(trainer, own, lr=0.1)
    return result, before, state_of(trainer), trainer.optimizer.step_count


@pytest.mark.parametrize("overrides", ["", "mesh.dp=2 zero.stage=2", "mesh.pp=2"])
def test_a_rank_without_trained_labels(overrides):
    """N02, N01: the second half of the batch is masked: the result is that of the first half, finite everywhere."""
    world = 2 if overrides else 1
    ((want, _, params, _),) = run_ranks(1, masked_steps, settings_of(""), (1,))
    for result, _, after, _ in run_ranks(world, masked_steps, settings_of(overrides), (1,)):
        assert not result.skipped
        assert (result.loss, result.grad_norm) == pytest.approx((want.loss, want.grad_norm), rel=1e-10)
        assert_same(after["main"], params["main"])


@pytest.mark.parametrize("optimizer", ["", "optimizer.name=sgd optimizer.eps=null optimizer.momentum=0.5"])
@pytest.mark.parametrize("overrides", ["", "mesh.dp=2 zero.stage=2", "mesh.pp=2"])
def test_a_step_without_any_trained_label(overrides, optimizer):
    """N02: loss 0, and no update: neither decay nor momentum moves weights that nothing was learned for."""
    world = 2 if overrides else 1
    settings = settings_of(f"{overrides} {optimizer}")
    for result, before, after, updates in run_ranks(world, masked_steps, settings, (0, 1)):
        assert (result.loss, result.grad_norm, result.valid_tokens, result.skipped) == (0.0, 0.0, 0, True)
        assert same_bits(before, after)
        assert updates == 1


def save_run(rank: int, world: int, settings: dict[str, Any], _: str) -> tuple[str, Moments, float]:
    """Two steps, a checkpoint right after the second, then the loss of the third."""
    trainer = make_trainer(settings)
    batches = Batches(trainer, settings)
    for step in (1, 2):
        train_step(trainer, batches.microbatches(step), lr=0.01)
    path = save_state(trainer, 2)
    return str(path), state_of(trainer), train_step(trainer, batches.microbatches(3), lr=0.01).loss


def load_run(rank: int, world: int, settings: dict[str, Any], path: str) -> tuple[int, Moments, float]:
    trainer = make_trainer(settings)
    step = load_state(trainer, Path(path))
    held = state_of(trainer)
    return step, held, train_step(trainer, Batches(trainer, settings).microbatches(step + 1), lr=0.01).loss


CHAINS = {
    "pp2-tp2-gpt": (4, f"mesh.pp=2 mesh.tp=2 {GPT}", [(1, GPT), (2, f"mesh.dp=2 zero.stage=3 {GPT}")]),
    "dp4-zero3": (4, "mesh.dp=4 zero.stage=3", [(3, "mesh.dp=3 zero.stage=2"), (1, "")]),
    "tp2-vocab5": (4, "mesh.tp=4 model.vocab_size=5", [(1, "model.vocab_size=5")]),
}


@pytest.mark.parametrize("name", CHAINS)
def test_state_survives_a_change_of_layout(tmp_path, name):
    """C07, L09, P09, Z06, Z08, C05, C13: saved right after a step under one layout, loaded under others: the same bits
    of weights and moments, names without gaps, no row of padding, and the next loss is that of the unbroken run."""
    world, overrides, others = CHAINS[name]
    common = f"batch.global_batch_size=12 run.dir={tmp_path}"
    settings = settings_of(f"{overrides} {common}")
    path, state, loss = run_ranks(world, save_run, settings, "")[0]
    model, layers = settings["model"], {key.split(".")[1] for key in state["main"] if key.startswith("layers.")}
    assert layers == {str(i) for i in range(model["num_layers"])}
    with Reader(Path(path)) as reader:
        shape = reader.tensor("main", "embedding.word.weight").shape
    assert shape == (model["vocab_size"], model["hidden_size"])
    assert all(values.any() for values in state["exp_avg_sq"].values())
    for ranks, layout in others:
        for step, held, next_loss in run_ranks(ranks, load_run, settings_of(f"{layout} {common}"), path):
            assert step == 2
            assert same_bits(held, state)
            assert next_loss == pytest.approx(loss, rel=1e-10)
