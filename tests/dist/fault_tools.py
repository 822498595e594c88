"""What the tests of public faults share on ranks: a trainer from overrides, microbatches of any size, and the oracle's
loss and gradients over microbatches of different sizes."""

from typing import Any

import torch
from torch import Tensor

from megalite.batch import IGNORE, Microbatch
from megalite.config.load import check
from megalite.train.build import Trainer, build, sizes_of
from tests import reference_gpt as oracle
from tests.dist.layouts import BASE, with_overrides
from tests.dist.pool import mesh_for

TOLERANCE = 1e-10


def settings_of(overrides: str) -> dict[str, Any]:
    """The small model of the layouts with `key=value` overrides."""
    return with_overrides(BASE, overrides)


def make_trainer(settings: dict[str, Any]) -> Trainer:
    """This rank's trainer of the whole pool's run."""
    config = check(settings, {}, name="fault")
    mesh = mesh_for(sizes_of(config), config.kv_replicas, cpu_backend=config.comm.cpu_backend)
    return build(config, mesh)


def make_microbatch(B: int, S: int, *, seed: int, vocab_size: int, trained: float = 0.8) -> Microbatch:
    """Random tokens; about the share `trained` of the labels is trained on."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (B, S), generator=generator)
    labels = torch.randint(vocab_size, (B, S), generator=generator)
    labels[torch.rand(B, S, generator=generator) >= trained] = IGNORE
    return Microbatch(tokens, labels)


def oracle_grads(
    initial: dict[str, Tensor], settings: dict[str, Any], batches: list[Microbatch]
) -> tuple[float, dict[str, Tensor]]:
    """Mean loss over all trained tokens of all microbatches, and its gradients."""
    model = oracle.resolve(**settings["model"])
    counts = [int((batch.labels != IGNORE).sum()) for batch in batches]
    loss, grads = 0.0, {name: torch.zeros_like(value) for name, value in initial.items()}
    for batch, count in zip(batches, counts, strict=True):
        if count:
            one_loss, one = oracle.gradients(initial, model, {"tokens": batch.tokens, "labels": batch.labels})
            loss += one_loss * count / sum(counts)
            for name, grad in one.items():
                grads[name] += grad * count / sum(counts)
    return loss, grads


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    """Every tensor equals the expected one relative to the largest element of all."""
    assert actual.keys() == expected.keys()
    scale = max(value.abs().max().item() for value in expected.values())
    for name, value in expected.items():
        error = (actual[name].to(value.dtype) - value).abs().max().item()
        assert error <= tolerance * scale, f"{name}: error {error:.2e}, largest value {scale:.2e}"
