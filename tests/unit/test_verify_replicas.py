"""The hash that copies are compared by, and when the training loop compares; on ranks: tests/dist/test_verify.py."""

from dataclasses import dataclass

import pytest
import torch

from megalite.config.load import check
from megalite.mesh import single_device_mesh
from megalite.train import loop, replicas
from megalite.train.build import build
from megalite.train.loop import Loaders, run_loop
from megalite.train.replicas import bits_hash
from megalite.train.signals import StopFlag
from megalite.verify.data import own_microbatches
from tests.dist.layouts import BASE, with_overrides


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_the_hash_sees_one_bit_and_the_order(dtype):
    values = torch.arange(1, 101).to(dtype)
    other = values.clone()
    other.view(torch.uint8)[57] ^= 1
    swapped = values.clone()
    swapped[[3, 70]] = swapped[[70, 3]]
    hashes = {int(bits_hash(each)) for each in (values, other, swapped, values[:99], values.flip(0))}
    assert len(hashes) == 5
    assert bits_hash(values.view(10, 10)) == bits_hash(values)
    assert bits_hash(torch.stack([values, other], 1)[:, 0]) == bits_hash(values)


def test_the_hash_tells_zeros_and_nans_apart_and_not_chunks(monkeypatch):
    assert bits_hash(torch.tensor([0.0])) != bits_hash(torch.tensor([-0.0]))
    assert bits_hash(torch.tensor([torch.nan])) == bits_hash(torch.tensor([torch.nan]))
    assert bits_hash(torch.empty(0)) == 0
    values = torch.randn(1000)
    whole = bits_hash(values)
    monkeypatch.setattr(replicas, "CHUNK", 7)
    assert bits_hash(values) == whole


@dataclass
class Batches:
    """A loader that makes verify's batches."""

    config: object

    def microbatches(self, step):
        return own_microbatches(self.config, 0, step)


@pytest.mark.parametrize(("every", "expected"), [(0, []), (1, [1, 2, 3]), (2, [2])])
def test_the_loop_compares_every_so_many_steps(every, expected, tmp_path, monkeypatch):
    settings = with_overrides(BASE, f"model.num_layers=1 run.check_replicas_every={every} run.dir={tmp_path}")
    trainer = build(check(settings, {}, name="loop"), single_device_mesh())
    steps = []
    monkeypatch.setattr(loop, "check_replicas", lambda trainer, step: steps.append(step))
    assert run_loop(trainer, Loaders(Batches(trainer.config), None), None, start=0, stop=StopFlag())
    assert steps == expected


def test_one_rank_has_no_copies():
    trainer = build(check(with_overrides(BASE, "model.num_layers=1"), {}, name="one"), single_device_mesh())
    replicas.check_replicas(trainer, 1)
