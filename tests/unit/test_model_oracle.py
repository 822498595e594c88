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


def _jitter(stages) -> None:
    """Nothing stays at a special value: norms leave one, biases leave zero."""
    generator = torch.Generator().manual_seed(11)
    for stage in stages:
        for param in stage.parameters():
            param.data.add_(torch.randn(param.shape, generator=generator, dtype=param.dtype), alpha=0.1)


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
    _jitter(stages)
    batch = make_batch(config, documents=documents)
    set_main_grads(stages, torch.float64)
    losses = run(stages, batch)
    expected, grads = _oracle(config, stages, batch)
    torch.testing.assert_close(losses, expected, rtol=1e-11, atol=1e-13)
    found = assemble([boxes(stages, grads=True)])
    assert found.keys() == grads.keys()
    for key, grad in grads.items():
        torch.testing.assert_close(found[key], grad, rtol=1e-10, atol=1e-12, msg=lambda m, key=key: f"{key}: {m}")
