"""Dropout in the model: a function of the sample's place in the global batch, off in evaluation."""

import torch
from torch import nn

from megalite.batch import Microbatch
from megalite.mesh import single_device_mesh
from tests.unit.model_tools import GPT, LLAMA, make_batch, make_config, make_stages, params_of, run, set_main_grads

DROPOUT = {"dropout": 0.3, "attention_dropout": 0.2}


def split_batch(batch: Microbatch) -> list[Microbatch]:
    """One microbatch per sequence."""
    return [
        Microbatch(batch.tokens[i : i + 1], batch.labels[i : i + 1], None, batch.sample_start + i, batch.step)
        for i in range(batch.tokens.shape[0])
    ]


def test_masks_do_not_depend_on_the_microbatch():
    for model in (GPT | DROPOUT, LLAMA | DROPOUT):
        config = make_config(model)
        stages = make_stages(config, single_device_mesh())
        set_main_grads(stages, torch.float64)
        batch = make_batch(config, start=3)
        whole = run(stages, batch)
        parts = torch.cat([run(stages, part) for part in split_batch(batch)])
        torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-14)


def test_masks_depend_on_sample_step_and_seed():
    config = make_config(GPT | {"dropout": 0.3})
    other_seed = make_config(GPT | {"dropout": 0.3}, run={"seed": 99})
    batch = make_batch(config)
    changed = [
        (config, Microbatch(batch.tokens, batch.labels, sample_start=1)),
        (config, Microbatch(batch.tokens, batch.labels, step=1)),
        (other_seed, batch),
    ]
    base = run(prepared(config), batch)
    assert torch.equal(base, run(prepared(config), batch))
    for other, microbatch in changed:
        assert not torch.allclose(run(prepared(other), microbatch), base)


def prepared(config):
    stages = make_stages(config, single_device_mesh())
    set_main_grads(stages, torch.float64)
    return stages


def test_evaluation_does_not_drop():
    config, plain = make_config(LLAMA | DROPOUT), make_config(LLAMA)
    stages, expected = prepared(config), prepared(plain)
    nn.ModuleList(stages).eval()
    batch = make_batch(config)
    torch.testing.assert_close(run(stages, batch), run(expected, batch), rtol=1e-12, atol=1e-14)
    assert all(param.main_grad.any() for param in params_of(stages))


def test_attention_dropout_near_zero_is_attention():
    """The explicit path with practically no dropout equals the fused one, with kv heads shared and documents masked."""
    explicit, fused = (make_config(LLAMA | {"attention_dropout": p}) for p in (1e-12, 0.0))
    batch = make_batch(fused, documents=True)
    torch.testing.assert_close(run(prepared(explicit), batch), run(prepared(fused), batch), rtol=1e-10, atol=1e-12)
