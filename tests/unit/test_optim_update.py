"""ShardOptimizer in a trainer: the clip factor inside the update, the compute copy written by the kernel, the choice of
the implementation, and steps that change nothing."""

import math

import pytest
import torch

from megalite import native
from megalite.kernels.adamw import native_impl, reference
from megalite.optim.norm import clip_factor
from megalite.train.logical import full_grads, full_params
from megalite.train.step import compute_grads, train_step
from tests.dist.fault_tools import make_microbatch, make_trainer, settings_of

ADAMW = "optimizer.name=adamw"
SGD = "optimizer.name=sgd optimizer.eps=null optimizer.momentum=0.5"


def trainer_and_batches(overrides: str, *, trained: float = 0.8):
    settings = settings_of(overrides)
    trainer = make_trainer(settings)
    batch = trainer.config.batch
    batches = [
        make_microbatch(
            batch.micro_batch_size, batch.seq_len, seed=i, vocab_size=trainer.config.model.vocab_size, trained=trained
        )
        for i in range(batch.num_microbatches)
    ]
    return trainer, batches


@pytest.mark.parametrize("name", [ADAMW, SGD])
@pytest.mark.parametrize("compute", ["bf16", "fp32", "fp64"])
def test_the_clip_factor_acts_and_the_shards_keep_the_whole_gradient(name, compute):
    """Equal to scaling the gradients first; the clip bites."""
    overrides = f"{name} precision.compute={compute} optimizer.clip_norm=0.01"
    fused, batches = trainer_and_batches(overrides)
    apart, _ = trainer_and_batches(overrides)
    result = train_step(fused, batches, lr=0.01)
    assert compute_grads(apart, batches).grad_norm == result.grad_norm
    before = full_grads(apart)
    factor = clip_factor(result.grad_norm, 0.01)
    assert factor < 1
    for unit in apart.zero.units.values():
        unit.grad.mul_(factor)
    apart.optimizer.update(0.01)
    expected = full_params(apart)
    for key, value in full_params(fused).items():
        assert torch.equal(value, expected[key]), key
    for key, value in full_grads(fused).items():
        assert torch.equal(value, before[key]), key
    norm = math.sqrt(sum(value.double().square().sum().item() for value in before.values()))
    assert norm == pytest.approx(result.grad_norm, rel=1e-6)


@pytest.mark.parametrize("name", [ADAMW, SGD])
def test_parameters_are_the_cast_of_main_params_after_a_step(name):
    trainer, batches = trainer_and_batches(f"{name} precision.compute=bf16")
    assert not train_step(trainer, batches, lr=0.01).skipped
    for unit in trainer.zero.units.values():
        assert unit.shard.dtype == torch.bfloat16
        assert torch.equal(unit.shard, unit.main.bfloat16())


def test_the_kernel_writes_the_copy_and_nothing_copies_again():
    """Main params that change behind the optimizer's back show only after an `updated` of their own."""
    trainer, batches = trainer_and_batches(f"{ADAMW} precision.compute=bf16")
    compute_grads(trainer, batches)
    trainer.optimizer.update(0.01)
    unit = next(iter(trainer.zero.units.values()))
    assert torch.equal(unit.shard, unit.main.bfloat16())
    unit.main.add_(1.0)
    unit.updated()
    assert not torch.equal(unit.shard, unit.main.bfloat16())
    unit.updated()  # as after a load
    assert torch.equal(unit.shard, unit.main.bfloat16())


@pytest.mark.parametrize("name", [ADAMW, SGD])
@pytest.mark.parametrize("broken", [math.inf, math.nan])
def test_a_skipped_step_changes_nothing(name, broken):
    trainer, batches = trainer_and_batches(f"{name} precision.compute=bf16")
    assert not train_step(trainer, batches, lr=0.01).skipped
    pieces = trainer.optimizer.pieces()["main"]
    next(piece.data for piece in pieces if piece.part.name == "final_norm.weight")[0] = broken  # so the loss is, too
    trainer.zero.updated()
    before = {kind: [p.data.clone() for p in pieces] for kind, pieces in trainer.optimizer.pieces().items()}
    copies = [u.shard.clone() for u in trainer.zero.units.values()]
    result = train_step(trainer, batches, lr=0.01)
    assert result.skipped
    assert trainer.optimizer.step_count == 1
    for kind, pieces in trainer.optimizer.pieces().items():
        for piece, old in zip(pieces, before[kind], strict=True):
            assert torch.equal(piece.data.view(torch.int32), old.view(torch.int32)), kind
    for one, old in zip(trainer.zero.units.values(), copies, strict=True):
        assert torch.equal(one.shard.view(torch.int16), old.view(torch.int16))


def test_which_implementation_a_trainer_uses():
    if native.load() is None:
        pytest.skip(f"not built: {native.why_missing()}")
    for compute, wanted in {"fp32": native_impl, "bf16": native_impl, "fp64": reference}.items():
        trainer, _ = trainer_and_batches(f"{ADAMW} precision.compute={compute}")
        assert trainer.optimizer.kernel.module is wanted
    trainer, _ = trainer_and_batches(f"{ADAMW} optimizer.implementation=reference precision.compute=fp32")
    assert trainer.optimizer.kernel.module is reference
    assert trainer.optimizer.norm_kernel.name == "reference"


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (f"{ADAMW} optimizer.implementation=cuda", "cuda can't be met for adamw: it needs a CUDA device"),
        (f"{ADAMW} optimizer.implementation=native precision.compute=fp64", "it computes in fp32"),
        (f"{ADAMW} optimizer.implementation=apex", "apex can't be met: Apex is not installed"),
        (f"{SGD} optimizer.implementation=apex", "apex has AdamW only; use optimizer.name=adamw"),
    ],
)
def test_a_choice_that_can_t_be_met_is_refused(overrides, match):
    with pytest.raises(ValueError, match=match):
        trainer_and_batches(overrides)


def test_native_and_reference_train_alike():
    """Three bf16 steps; the two differ by roundings of fp32 only."""
    results = []
    for implementation in ("native", "reference"):
        if implementation == "native" and native.load() is None:
            pytest.skip(f"not built: {native.why_missing()}")
        trainer, batches = trainer_and_batches(
            f"{ADAMW} optimizer.implementation={implementation} precision.compute=fp32"
        )
        for _ in range(3):
            train_step(trainer, batches, lr=1e-3)
        results.append(full_params(trainer))
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], rtol=1e-5, atol=1e-6)
