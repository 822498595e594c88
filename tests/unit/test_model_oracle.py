"""The model on one rank against the oracle in float64: losses and every gradient, over the fields of `model`."""

import pytest
import torch

from megalite.mesh import single_device_mesh
from tests import reference_gpt as oracle
from tests.unit.model_tools import (
    GPT,
    LLAMA,
    assemble,
    boxes,
    jitter,
    make_batch,
    make_config,
    make_stages,
    run,
    set_main_grads,
)

VARIANTS = {
    "llama": LLAMA,
    "llama_tied": LLAMA | {"tie_embeddings": True},
    "llama_one_kv_head": LLAMA | {"num_kv_heads": 1},
    "llama_head_dim": LLAMA | {"head_dim": 12},
    "llama_bias": LLAMA | {"bias": True},
    "llama_layernorm_gelu": LLAMA | {"norm": "layernorm", "activation": "gelu"},
    "llama_linear_scaling": LLAMA | {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "llama3_scaling": LLAMA | {"rope_theta": 50.0, "rope_scaling": {"type": "llama3", "original_max_seq_len": 64}},
    "llama_learned": LLAMA | {"position": "learned"},
    "gpt": GPT,
    "gpt_untied": GPT | {"tie_embeddings": False},
    "gpt_no_bias": GPT | {"bias": False},
    "gpt_rope_gqa": GPT | {"position": "rope", "num_kv_heads": 2},
    "gpt_rmsnorm_swiglu": GPT | {"norm": "rmsnorm", "activation": "swiglu", "norm_eps": 1e-3},
}


def _oracle(config, stages, batch):
    model = oracle.resolve(**config.model.model_dump())
    params = assemble([boxes(stages)])
    assert {name: tuple(value.shape) for name, value in params.items()} == oracle.logical_shapes(model)
    data = {"tokens": batch.tokens, "labels": batch.labels, "documents": batch.documents}
    losses = oracle.forward(params, model, **data)
    return losses.reshape(-1), oracle.gradients(params, model, data)[1]


@pytest.mark.parametrize("documents", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("name", VARIANTS)
def test_losses_and_gradients_equal_the_oracle(name, documents):
    config = make_config(VARIANTS[name])
    stages = make_stages(config, single_device_mesh())
    jitter(stages)
    batch = make_batch(config, documents=documents)
    set_main_grads(stages, torch.float64)
    losses = run(stages, batch)
    expected, grads = _oracle(config, stages, batch)
    torch.testing.assert_close(losses, expected, rtol=1e-11, atol=1e-13)
    found = assemble([boxes(stages, grads=True)])
    assert found.keys() == grads.keys()
    for key, grad in grads.items():
        torch.testing.assert_close(found[key], grad, rtol=1e-10, atol=1e-12, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt"])
def test_bf16_with_fp32_main_gradients_is_near_float64(model):
    """From the same bf16 weights: fp32 losses and fp32 main gradients within some bf16 roundings of the oracle, which
    are luck in one batch: the mean of four.

    The gradient of a k bias is zero but for rounding, so small gradients are held against the total norm.
    """
    batches = [bf16_errors(model, seed) for seed in range(3, 7)]
    for key in batches[0]:
        error = sum(errors[key] for errors in batches) / len(batches)
        assert error < 0.03, f"{key}: relative error {error:.3f}"


def bf16_errors(model, seed):
    """Relative errors of the main gradients by name."""
    config = make_config(model, dtype="bf16")
    stages = make_stages(config, single_device_mesh())
    jitter(stages)
    set_main_grads(stages, torch.float32)
    batch = make_batch(config, seed=seed)
    losses = run(stages, batch)
    assert losses.dtype == torch.float32
    wide = {name: value.double() for name, value in assemble([boxes(stages)]).items()}
    data = {"tokens": batch.tokens, "labels": batch.labels}
    plain = oracle.resolve(**config.model.model_dump())
    expected, grads = oracle.forward(wide, plain, **data).reshape(-1), oracle.gradients(wide, plain, data)[1]
    torch.testing.assert_close(losses.double(), expected, rtol=0.02, atol=0.02)
    total = sum(grad.square().sum() for grad in grads.values()).sqrt()
    found = assemble([boxes(stages, grads=True)])
    return {
        key: float((found[key].double() - grad).norm() / max(grad.norm(), 0.01 * total)) for key, grad in grads.items()
    }
