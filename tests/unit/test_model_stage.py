"""Stages and ZeRO units: which links and parameters are built where, under which names, and what is shared."""

import math

import pytest
import torch

from megalite.mesh import Group, Mesh, Sizes, single_device_mesh
from megalite.model.init import init_tensor, materialize
from megalite.model.stage import build_stages, stage_units
from megalite.observe.ledger import Ledger
from tests import reference_gpt as oracle
from tests.unit.model_tools import GPT, LLAMA, assemble, make_batch, make_config, make_stages, run, set_main_grads


def mesh_of_rank(rank: int, tp: int, kv_replicas: int = 1) -> Mesh:
    """The mesh of a rank that communicates with nobody."""
    alone = Group("none")
    group = Group("tp", tuple(range(tp)), rank)
    first = rank // kv_replicas * kv_replicas
    kv = Group("kv", tuple(range(first, first + kv_replicas)), rank - first)
    names = ("world", "pp", "pp_backward", "dp", "dp_replicate", "dp_shard", "tied")
    groups = dict.fromkeys(names, alone) | {"tp": group, "kv": kv}
    return Mesh(sizes=Sizes(tp=tp), rank=rank, device=torch.device("cpu"), ledger=Ledger(), **groups)


def names_of(units):
    return {unit: [name for _, _, name in places] for unit, places in units.items()}


def test_stages_build_only_their_links():
    config = make_config(LLAMA | {"num_layers": 5}, mesh={"pp": 2}, pipeline={"layers": (2, 3)})
    (first,) = build_stages(config, single_device_mesh(), [0])
    (last,) = build_stages(config, single_device_mesh(), [1])
    assert [type(link).__name__ for link in first.links] == ["EmbeddingLink", "Block", "Block"]
    assert [type(link).__name__ for link in last.links] == ["Block", "Block", "Block", "HeadLink"]
    assert [link.layer for link in last.links[:-1]] == [2, 3, 4]
    assert (first.is_first, first.is_last, last.is_first, last.is_last) == (True, False, False, True)
    assert all(param.is_meta for stage in (first, last) for param in stage.parameters())


def test_a_stage_may_hold_no_block():
    config = make_config(LLAMA, mesh={"pp": 3}, pipeline={"schedule": "1f1b", "layers": (0, 2, 0)})
    stages = build_stages(config, single_device_mesh(), [0, 1, 2])
    assert [len(stage.links) for stage in stages] == [1, 2, 1]


def test_units_of_llama():
    units = stage_units(build_stages(make_config(LLAMA), single_device_mesh(), [0]))
    layer = [
        f"layers.1.{name}.weight"
        for name in ("attention_norm", "attention.qkv", "attention.out", "mlp_norm", "mlp.gate_up", "mlp.down")
    ]
    found = names_of(units)
    assert list(found) == ["embedding", "layers.0", "layers.1", "head"]
    assert found["embedding"] == ["embedding.word.weight"]
    assert sorted(found["layers.1"]) == sorted(layer)
    assert found["head"] == ["final_norm.weight", "head.weight"]


@pytest.mark.parametrize("model", [GPT, LLAMA | {"tie_embeddings": True}], ids=["gpt", "llama"])
def test_tied_weight_is_one_parameter_when_both_ends_are_here(model):
    stages = build_stages(make_config(model), single_device_mesh(), [0])
    units = stage_units(stages)
    (word, _, name), (output, _, other) = units["tied"]
    assert word.weight is output.weight
    assert name == other == "embedding.word.weight"
    assert word.weight.spec.tied
    assert not word.weight.spec.tied_copy
    assert ("embedding" in units) == (model["family"] == "gpt")
    for link in stages[0].links:
        assert all(unit in units for unit in link.unit_names)
    assert stages[0].links[0].unit_names[-1] == stages[0].links[-1].unit_names[-1] == "tied"


def test_tied_weight_has_a_copy_on_another_rank():
    config = make_config(GPT, mesh={"pp": 2})
    first = stage_units(build_stages(config, single_device_mesh(), [0]))
    last = stage_units(build_stages(config, single_device_mesh(), [1]))
    ((word, _, name),) = first["tied"]
    ((output, _, copy_name),) = last["tied"]
    assert name == copy_name == "embedding.word.weight"
    assert (word.weight.spec.tied, word.weight.spec.tied_copy) == (True, False)
    assert (output.weight.spec.tied, output.weight.spec.tied_copy) == (True, True)
    assert word.weight.spec.parts == output.weight.spec.parts
    values = [init_tensor(m.weight.spec, (101, 32), dtype=torch.float32, device="cpu", seed=1) for m in (word, output)]
    assert torch.equal(*values)


@pytest.mark.parametrize(
    "model", [GPT, LLAMA, LLAMA | {"num_kv_heads": 1, "bias": True}], ids=["gpt", "llama", "one_kv"]
)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_initial_values_do_not_depend_on_tp(model, tp):
    """Each logical element lies in num_replicas places, with the bits of one rank and the shapes of the oracle."""
    config = make_config(model, dtype="fp32", mesh={"tp": tp})
    alone = boxes_of_rank(make_config(model, dtype="fp32"), single_device_mesh())
    ranks = [boxes_of_rank(config, mesh_of_rank(rank, tp, config.kv_replicas)) for rank in range(tp)]
    expected, found = assemble([alone]), assemble(ranks)
    assert {name: tuple(x.shape) for name, x in found.items()} == oracle.logical_shapes(
        oracle.resolve(**config.model.model_dump())
    )
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    covered = {name: torch.zeros(x.shape) for name, x in expected.items()}
    for part, _ in (box for rank in ranks for box in rank):
        at = tuple(slice(start, start + size) for start, size in zip(part.start, part.shape, strict=True))
        covered[part.name][at] += 1.0 / part.num_replicas
        assert 0 <= part.replica < part.num_replicas
    for name, count in covered.items():
        torch.testing.assert_close(count, torch.ones_like(count), msg=f"{name} is not covered once")


def boxes_of_rank(config, mesh):
    """(part, initial values) without the head's second mention of a tied weight."""
    found = []
    for stage in build_stages(config, mesh, [0]):
        for param in stage.parameters():
            value = init_tensor(param.spec, tuple(param.shape), dtype=torch.float32, device="cpu", seed=5)
            row = 0
            for part in param.spec.parts:
                found.append((part, value[row : row + part.shape[0]]))
                row += part.shape[0]
            assert not value[row:].any(), "padding is not zero"
    return found


def test_initial_distribution():
    config = make_config(LLAMA | {"hidden_size": 128, "ffn_size": 256, "num_layers": 8, "vocab_size": 512})
    (stage,) = make_stages(config, single_device_mesh())
    block = stage.links[1]
    residual = config.model.init_std / math.sqrt(2 * 8)
    cases = [
        (stage.links[0].word, 0.2),
        (block.attention.qkv, 0.2),
        (block.mlp.gate_up, 0.2),
        (block.mlp.down, residual),
    ]
    for module, std in [*cases, (block.attention.out, residual), (stage.links[-1].output, 0.2)]:
        x = module.weight.detach()
        assert abs(x.std() / std - 1) < 5 / math.sqrt(2 * x.numel())
        assert abs(x.mean() / std) < 5 / math.sqrt(x.numel())
    assert torch.equal(block.attention_norm.weight.detach(), torch.ones(128, dtype=torch.float64))
    rows = block.attention.qkv.weight.detach()
    assert abs(torch.corrcoef(torch.stack([rows[:32].flatten(), rows[32:64].flatten()]))[0, 1]) < 0.05


def test_materialize_keeps_what_is_shared_and_the_specs():
    stages = build_stages(make_config(GPT), single_device_mesh(), [0])
    specs = {name: param.spec for name, param in stages[0].named_parameters()}
    materialize(stages[0], seed=1)
    assert stages[0].links[0].word.weight is stages[0].links[-1].output.weight
    assert {name: param.spec for name, param in stages[0].named_parameters()} == specs
    assert not any(param.is_meta for param in stages[0].parameters())


def test_gradients_without_a_main_gradient_go_to_autograd():
    config = make_config(GPT)
    plain, fused = (make_stages(config, single_device_mesh()) for _ in range(2))
    set_main_grads(fused, torch.float64)
    run(plain, make_batch(config))
    run(fused, make_batch(config))
    for a, b in zip(plain[0].parameters(), fused[0].parameters(), strict=True):
        assert b.grad is None
        torch.testing.assert_close(a.grad, b.main_grad, rtol=1e-12, atol=1e-14)


def test_main_gradients_accumulate():
    config = make_config(LLAMA)
    stages = make_stages(config, single_device_mesh())
    set_main_grads(stages, torch.float64)
    run(stages, make_batch(config, seed=1))
    once = [param.main_grad.clone() for param in stages[0].parameters()]
    run(stages, make_batch(config, seed=1))
    for param, grad in zip(stages[0].parameters(), once, strict=True):
        torch.testing.assert_close(param.main_grad, 2 * grad)
