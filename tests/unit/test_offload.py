"""Optimizer state in host memory: the same bits as without it, where tensors live, checkpoints, wrong inputs."""

import pytest
import torch

from megalite.batch import IGNORE
from megalite.config.load import check
from megalite.optim.offload import HostUnits
from megalite.train.logical import full_params
from megalite.train.state import load_state, save_state
from megalite.train.step import train_step
from tests.dist.fault_tools import make_trainer, settings_of
from tests.dist.layouts import SGD, global_batch
from tests.dist.test_layouts import own_microbatches

OFFLOADS = ["zero.offload_optimizer=cpu", "zero.offload_optimizer=cpu zero.offload_main=true"]


def trained(overrides: str, *, num_steps: int = 2, trainer=None, first: int = 0):
    settings = settings_of(overrides)
    trainer = trainer or make_trainer(settings)
    for step in range(first, first + num_steps):
        batches = own_microbatches(trainer.config, 0, global_batch(settings, "uneven", step), step)
        assert not train_step(trainer, batches, lr=0.01).skipped
    return trainer


BASES = ["", SGD, "precision.compute=bf16 zero.stage=2", "precision.compute=bf16 precision.moments=bf16"]


@pytest.mark.parametrize("base", BASES)
def test_offload_changes_no_bit(base):
    expected = full_params(trained(base))
    for offload in OFFLOADS:
        trainer = trained(f"{base} {offload}")
        found = full_params(trainer)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        for unit in trainer.zero.units.values():
            assert torch.equal(unit.shard, unit.main.to(unit.shard.dtype))


def test_offloaded_main_params_are_not_the_device_s():
    trainer = make_trainer(settings_of(f"precision.compute=fp32 {OFFLOADS[1]}"))
    for name, unit in trainer.zero.units.items():
        assert unit.main is trainer.optimizer.host.copies[name].main
        assert unit.main.data_ptr() != unit.shard.data_ptr()
    kept = make_trainer(settings_of(f"precision.compute=fp32 {OFFLOADS[0]}"))
    assert all(unit.main is unit.shard for unit in kept.zero.units.values())


def test_every_unit_is_updated_from_its_own_gradient_after_it_arrived(monkeypatch):
    """A copy that is left out must show: the host's copies are all that the update reads."""
    monkeypatch.setattr(HostUnits, "take", lambda self, unit, segments: self.taken.update({unit.name: 0}))
    broken = make_trainer(settings_of(OFFLOADS[1]))
    for host in broken.optimizer.host.copies.values():
        host.grad.zero_()
    trained(OFFLOADS[1], trainer=broken)
    expected = full_params(trained(""))
    assert not all(torch.equal(full_params(broken)[name], value) for name, value in expected.items())


def test_a_skipped_step_leaves_nothing_behind():
    """A batch that trains no token between two others."""
    found = []
    for offload in ("", OFFLOADS[0]):
        trainer = trained(offload, num_steps=1)
        batches = own_microbatches(trainer.config, 0, global_batch(settings_of(offload), "uneven", 1), 1)
        for batch in batches:
            batch.labels.fill_(IGNORE)
        assert train_step(trainer, batches, lr=0.01).skipped
        found.append(full_params(trained(offload, trainer=trainer, num_steps=1, first=2)))
    assert all(torch.equal(found[1][name], value) for name, value in found[0].items())


@pytest.mark.parametrize("offload", OFFLOADS)
def test_a_checkpoint_is_that_of_any_other_run(tmp_path, offload):
    """Saved offloaded, resumed on the device and the other way round: the same weights as without a stop."""
    where = f"run.dir={tmp_path} precision.compute=bf16"
    expected = full_params(trained(where, num_steps=3))
    for saving, loading in ((offload, ""), ("", offload)):
        path = save_state(trained(f"{where} {saving}"), 2)
        resumed = make_trainer(settings_of(f"{where} {loading}"))
        assert load_state(resumed, path) == 2
        trained(f"{where} {loading}", trainer=resumed, num_steps=1, first=2)
        found = full_params(resumed)
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ("zero.offload_main=true", "offload_main=true has no effect with zero.offload_optimizer=none"),
        (f"{OFFLOADS[0]} optimizer.implementation=triton", "the update runs on the CPU; use optimizer.implementation="),
        (f"{OFFLOADS[0]} {SGD} optimizer.momentum=0.0", "offload_optimizer=cpu has no effect with optimizer.name=sgd"),
    ],
)
def test_wrong_inputs(overrides, match):
    with pytest.raises(ValueError, match=match):
        check(settings_of(overrides), {}, name="x")
