"""Faults that make ranks disagree: every copy of a number holds the same bits on all ranks, before and after steps.

Copies are the tp replicas of norms, biases, positions and kv heads, dp replicas, gathered parameters, and the two ends
of a tied embedding. The gathered tests of `test_layouts.py` look at one copy only.
"""

from collections import defaultdict
from math import prod
from typing import Any

import pytest
import torch

from megalite.optim.norm import counted
from megalite.train.build import Trainer
from megalite.train.logical import full_grads, full_params
from megalite.train.step import compute_grads, train_step
from tests.dist.fault_tools import assert_same, make_trainer, settings_of
from tests.dist.layouts import GPT, SGD, global_batch
from tests.dist.pool import run_ranks
from tests.dist.test_layouts import own_microbatches

BF16 = "precision.compute=bf16"
WHOLE = {"final_norm.weight", "final_norm.bias", "embedding.position.weight", "layers.0.attention.out.bias"}
KV = {"layers.3.attention.k.weight", "layers.0.attention.v.weight", "final_norm.weight"}

CASES = {
    "tp2-gpt": (f"mesh.tp=2 {GPT} {SGD}", WHOLE),
    "tp2-gpt-no-sp": (f"mesh.tp=2 mesh.sequence_parallel=false {GPT} {SGD}", WHOLE),
    "tp2-gpt-dropout": (f"mesh.tp=2 {GPT} {SGD} model.dropout=0.1", WHOLE),
    "tp4-kv2-bf16": (f"mesh.tp=4 {BF16}", KV),
    "dp2-zero0-bf16": (f"mesh.dp=2 zero.stage=0 {BF16}", {"head.weight"}),
    "dp2-zero1-bf16": (f"mesh.dp=2 zero.stage=1 {BF16}", {"head.weight"}),
    "dp2-zero2": (f"mesh.dp=2 zero.stage=2 {SGD}", {"head.weight"}),
    "dp2-zero3-bf16": (f"mesh.dp=2 zero.stage=3 {BF16}", {"head.weight"}),
    "hsdp2x2-zero3": ("mesh.dp.replicate=2 mesh.dp.shard=2 zero.stage=3", {"head.weight"}),
    "pp2-tied-bf16": (f"mesh.pp=2 model.tie_embeddings=true {BF16}", {"embedding.word.weight"}),
}


def snapshot(trainer: Trainer) -> dict[tuple, torch.Tensor]:
    """All that this rank holds, by what it is: parameters as the model reads them, main params and main grads."""
    held = {}
    for unit in trainer.zero.units.values():
        unit.finish_gather()
        for param in unit.params:
            flat, begin = param.detach().reshape(-1), 0
            for part in param.spec.parts:
                held["full", part.name, part.start] = flat[begin : begin + prod(part.shape)].clone()
                begin += prod(part.shape)
        unit.reshard()
    pieces = {"main": trainer.optimizer.pieces()["main"], "grad": trainer.optimizer.grad_pieces()}
    for kind, runs in pieces.items():
        for piece in runs:
            held[kind, piece.part.name, piece.part.start, piece.offset] = piece.data.clone()
    return held


def copies(rank: int, world: int, settings: dict[str, Any]) -> list[dict]:
    """Snapshots before the first step and after each of two; each parameter is the cast of its main parameter."""
    trainer = make_trainer(settings)
    found = [snapshot(trainer)]
    for step in range(2):
        batches = own_microbatches(trainer.config, trainer.mesh.dp.rank, global_batch(settings, "uneven", step), step)
        assert not train_step(trainer, batches, lr=trainer.config.lr.peak).skipped
        found.append(snapshot(trainer))
        check_casts(trainer, found[-1])
    return found


def check_casts(trainer: Trainer, held: dict) -> None:
    """Z07, Z08: right after an update what the model reads is the cast of the main params, none is of the last step."""
    main = full_params(trainer)
    for unit in trainer.zero.units.values():
        for part in (part for param in unit.params for part in param.spec.parts):
            box = main[part.name][tuple(slice(s, s + n) for s, n in zip(part.start, part.shape, strict=True))]
            values = held["full", part.name, part.start]
            assert torch.equal(values, box.reshape(-1).to(values.dtype)), f"{part.name} is stale"


@pytest.mark.parametrize("name", CASES)
def test_every_copy_holds_the_same_bits(name):
    """P04, P05, P12, P16, Z07, Z08, Z13: replicas start equal, get equal gradients and stay equal."""
    overrides, wanted = CASES[name]
    settings = settings_of(overrides)
    shard = settings["mesh"].get("dp", 1)
    world = prod(shard.values()) if isinstance(shard, dict) else shard
    results = run_ranks(world * settings["mesh"].get("tp", 1) * settings["mesh"].get("pp", 1), copies, settings)
    for moment, held in enumerate(zip(*results, strict=True)):
        holders = defaultdict(list)
        for one in held:
            for key, value in one.items():
                holders[key].append(value)
        shared = {key[1] for key, values in holders.items() if len(values) > 1}
        assert wanted <= shared, f"no second copy of {wanted - shared}"
        differing = {key for key, values in holders.items() if not all(torch.equal(v, values[0]) for v in values)}
        assert not differing, f"moment {moment}: {sorted(map(str, differing))[:8]}"


def first_grads(rank: int, world: int, settings: dict[str, Any]) -> tuple:
    trainer = make_trainer(settings)
    batches = own_microbatches(trainer.config, trainer.mesh.dp.rank, global_batch(settings, "uneven", 0), 0)
    result = compute_grads(trainer, batches)
    return result.loss, result.grad_norm, full_grads(trainer)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_gradients_are_summed_in_fp32_over_microbatches_and_dp(stage):
    """Z13, Z02, O08, P17: four microbatches on each of two ranks, or eight on one: only the order of sums differs."""
    one = settings_of(f"{BF16} {SGD}")
    (want,) = run_ranks(1, first_grads, one)
    results = run_ranks(2, first_grads, settings_of(f"{BF16} {SGD} mesh.dp=2 zero.stage={stage}"))
    for loss, norm, grads in results:
        assert loss == pytest.approx(want[0], rel=1e-6)
        assert norm == pytest.approx(want[1], rel=1e-5)
        assert_same(grads, want[2], 1e-5)  # bf16 sums would be off by 4e-3


def zero_gradients(rank: int, world: int, settings: dict[str, Any]) -> tuple:
    trainer = make_trainer(settings)
    before = full_params(trainer)
    trainer.zero.begin_step()
    trainer.optimizer.update(0.1)
    trainer.zero.updated()
    return before, full_params(trainer)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_decay_takes_matrices_only(model, stage):
    """O05: zero gradients, lr 0.1, decay 0.5: matrices times 0.95; norms and biases keep their bits, also in shards."""
    family = GPT if model == "gpt" else ""
    settings = settings_of(f"mesh.dp=2 zero.stage={stage} {family} optimizer.weight_decay=0.5")
    before, after = run_ranks(2, zero_gradients, settings)[0]
    assert any(value.dim() == 1 for value in before.values())
    for name, value in before.items():
        if value.dim() == 1:
            assert torch.equal(after[name], value), name
        else:
            torch.testing.assert_close(after[name], value * 0.95, rtol=1e-15, atol=0.0)


def holds_only_its_own(rank: int, world: int, settings: dict[str, Any]) -> tuple:
    trainer = make_trainer(settings)
    runs = [run for unit in trainer.zero.units.values() for run in trainer.zero.runs(unit) if counted(run)]
    return sum(run.length for run in runs), trainer.zero.owns_replica


@pytest.mark.parametrize("overrides", ["mesh.tp=4 mesh.dp=1", f"mesh.tp=2 mesh.dp=2 zero.stage=3 {GPT}"])
def test_each_element_counts_once_in_the_norm(overrides):
    """P03, Z11: what the ranks count adds up to the model, so a replica can't inflate the norm by sqrt(tp)."""
    settings = settings_of(overrides)
    (total, _), *_ = run_ranks(1, holds_only_its_own, settings | {"mesh": {}, "zero": {}})
    assert sum(length for length, owns in run_ranks(4, holds_only_its_own, settings) if owns) == total
