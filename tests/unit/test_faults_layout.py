"""Faults of layouts, stages and shapes that arithmetic alone shows: no ranks are needed."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from megalite.batch import Microbatch
from megalite.config.load import check
from megalite.kernels.wgrad import accumulate_bias, accumulate_grad, accumulate_rows, accumulate_wgrad
from megalite.mesh import single_device_mesh
from megalite.model.context import model_context
from megalite.model.dropout import attention_dropout, residual_dropout
from megalite.model.stage import build_stages
from megalite.observe.progress import step_line
from megalite.parallel.spec import ParamSpec, Part
from megalite.parallel.zero.layout import flat_layout
from megalite.train.build import build
from megalite.train.step import train_step
from tests.dist.layouts import BASE, with_overrides
from tests.unit.model_tools import GPT, LLAMA, make_batch, make_config
from tests.unit.test_model_stage import mesh_of_rank


@pytest.mark.parametrize("num_heads", [4, 6, 12])
def test_three_ranks_never_share_two_kv_heads(num_heads):
    """P07, R05: refused at the start with both numbers; four ranks for two kv heads work (test_layouts, tp4-kv2)."""
    overrides = f"model.num_heads={num_heads} model.head_dim=8 mesh.tp=3 batch.seq_len=15 batch.micro_batch_size=1"
    with pytest.raises(ValueError, match=r"mesh\.tp=3 .*model\.num_(kv_heads=2|heads=4)"):
        check(with_overrides(BASE, overrides), {}, name="x")
    check(with_overrides(BASE, "mesh.tp=4"), {}, name="x")


SMALL = LLAMA | {"vocab_size": 101, "max_seq_len": 16}
SPLITS = [(6, 4, 1), (10, 2, 2), (30, 4, 1), (80, 16, 2), (7, 2, 1), (7, 2, 2), (5, 5, 1), (4, 2, 2)]


@pytest.mark.parametrize(("num_layers", "pp", "virtual"), SPLITS)
def test_every_layer_is_built_once_and_in_order(num_layers, pp, virtual):
    """L07, L08: layers that stages do not divide are spread, none is dropped or doubled; parameters add up."""
    schedule = {"schedule": "interleaved", "virtual": virtual} if virtual > 1 else {}
    batch = {"global_batch_size": pp, "micro_batch_size": 1}
    model = SMALL | {"num_layers": num_layers}
    config = check({"model": model, "batch": batch, "mesh": {"pp": pp}, "pipeline": schedule}, {}, name="x")
    stages = build_stages(config, single_device_mesh(), list(range(config.num_stages)))
    layers = [[block.layer for block in stage.links if hasattr(block, "layer")] for stage in stages]
    assert [layer for own in layers for layer in own] == list(range(num_layers))
    (whole,) = build_stages(check({"model": model, "batch": batch}, {}, name="x"), single_device_mesh(), [0])
    numel = [sum(param.numel() for param in stage.parameters()) for stage in stages]
    assert sum(numel) == sum(param.numel() for param in whole.parameters())
    assert max(map(len, layers)) - min(map(len, layers)) <= 1


@pytest.mark.parametrize("layers", [[6, 1], [0, 7], [7, 0]])
def test_a_last_stage_of_its_own_length(layers):
    """L08: offsets follow the given lengths, whichever stage is the odd one."""
    config = make_config(LLAMA | {"num_layers": 7}, mesh={"pp": 2}, pipeline={"layers": tuple(layers)})
    stages = build_stages(config, single_device_mesh(), [0, 1])
    found = [[block.layer for block in stage.links if hasattr(block, "layer")] for stage in stages]
    assert found == [list(range(layers[0])), list(range(layers[0], 7))]


def contexts(*, sequence_parallel: bool) -> list:
    """Of two tp ranks, and of one without tp."""
    model = GPT | {"dropout": 0.5, "attention_dropout": 0.5}
    config = make_config(model, mesh={"tp": 2, "sequence_parallel": sequence_parallel})
    alone = model_context(make_config(model), single_device_mesh())
    return [*(model_context(config, mesh_of_rank(rank, 2)) for rank in range(2)), alone]


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_masks_of_sharded_and_of_replicated_rows(sequence_parallel):
    """P12, P13: shards of the sequence and of the heads have different masks, replicated rows the same one; joined they
    are the mask of one rank."""
    *ranks, alone = contexts(sequence_parallel=sequence_parallel)
    batch = make_batch(make_config(GPT), start=3)
    whole = residual_dropout(torch.ones(32, 32), "x", context=alone, batch=batch)
    rows = 16 if sequence_parallel else 32
    first, second = (residual_dropout(torch.ones(rows, 32), "x", context=c, batch=batch) for c in ranks)
    assert 0.4 < (whole == 0).double().mean() < 0.6
    if sequence_parallel:
        assert not torch.equal(first, second)
        assert torch.equal(torch.cat([first, second]), whole)
    else:
        assert torch.equal(first, second)
        assert torch.equal(first, whole)
    heads = [attention_dropout(torch.ones(2, 2, 16, 16), "x", context=c, batch=batch) for c in ranks]
    assert not torch.equal(*heads)
    both = attention_dropout(torch.ones(2, 4, 16, 16), "x", context=alone, batch=batch)
    assert torch.equal(torch.cat(heads, dim=1), both)


def test_a_run_takes_nothing_from_global_generators():
    """P12, P14, C07: initial values, dropout and recompute follow from seed and index, so no generator can drift."""
    overrides = "model.dropout=0.1 model.attention_dropout=0.1 recompute=full batch.global_batch_size=1"
    config = check(with_overrides(BASE, overrides), {}, name="x")
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    trainer = build(config, single_device_mesh())
    batch = replace(make_batch(make_config(LLAMA)), sample_start=0)
    train_step(trainer, [batch], lr=0.1)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_nothing_of_a_model_is_a_buffer_or_stays_on_meta(family, stage):
    """Z12: there is no buffer that a load or a gather could skip; every parameter has values after the build."""
    overrides = f"model.family={family} model.num_kv_heads=4 zero.stage={stage}"
    trainer = build(check(with_overrides(BASE, overrides), {}, name="x"), single_device_mesh())
    for built in trainer.stages:
        assert not list(built.buffers())
        assert all(param.device.type == "cpu" for param in built.parameters())


@pytest.mark.parametrize("num_shards", [1, 4])
def test_offsets_of_shards_past_two_billion_elements(num_shards):
    """O04: a tensor of 2^31 + 8 elements behind a small one: shards hold every element once, up to the last."""
    numel = 2**31 + 8
    spec = ParamSpec((Part("w", (numel,), (0,), (numel,)),), "linear")
    small = ParamSpec((Part("b", (3,), (0,), (3,)),), "bias")
    layout = flat_layout([("b", small, (3,)), ("w", spec, (numel,))], num_shards)
    runs = [run for shard in range(num_shards) for run in layout.runs(shard) if run.part.name == "w"]
    ends = np.cumsum([run.length for run in runs]).tolist()
    assert [run.part_offset for run in runs] == [0, *ends[:-1]]
    assert ends[-1] == numel
    last = layout.runs(num_shards - 1)[-1]
    end = last.shard_offset + last.length
    assert (num_shards - 1) * layout.shard_numel + end == 8 + numel
    assert layout.segments(num_shards - 1, lambda run: True) == [(0, end)]


ONE = torch.ones(1, 1, dtype=torch.bfloat16)
ADDERS = {
    "linear": lambda param, value: accumulate_wgrad(param, value * ONE, ONE),
    "bias": lambda param, value: accumulate_bias(param, (value * ONE)[0][None]),
    "embedding": lambda param, value: accumulate_rows(param, torch.tensor([0]), value * ONE),
    "norm": lambda param, value: accumulate_grad(param, torch.full(param.shape, float(value))),
}


@pytest.mark.parametrize("kind", ADDERS)
def test_a_small_gradient_is_not_lost_beside_a_large_one(kind):
    """Z14: microbatches that give 256 and 1 add up to 257; a bf16 sum stays at 256."""
    shape = (1,) if kind in ("bias", "norm") else (1, 1)
    param = torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))
    param.main_grad = torch.zeros(shape)
    for value in (256, 1):
        assert ADDERS[kind](param, value) is None
    assert param.main_grad.item() == 257.0
    assert (torch.tensor(256.0).bfloat16() + torch.tensor(1.0).bfloat16()).item() == 256.0


def test_repeated_rows_of_one_microbatch_are_summed_in_fp32():
    """Z14: the same token twice, with gradients 256 and 1."""
    param = torch.nn.Parameter(torch.zeros(2, 1, dtype=torch.bfloat16))
    param.main_grad = torch.zeros(2, 1)
    accumulate_rows(param, torch.tensor([1, 1]), torch.tensor([[256.0], [1.0]]).bfloat16())
    assert param.main_grad.tolist() == [[0.0], [257.0]]


def test_weighted_mean_over_microbatches():
    """N01: 32 tokens of mean loss 2 and one of 8 are 72 / 33, whichever microbatch or rank they lie in."""
    config = check(with_overrides(BASE, "batch.global_batch_size=2 model.vocab_size=101"), {}, name="x")
    trainer = build(config, single_device_mesh())
    losses = [torch.tensor(32 * 2.0, dtype=torch.float64), torch.tensor(8.0, dtype=torch.float64)]
    trainer.runtime.run = lambda batches, *, loss_grad: losses if loss_grad == 1 / 33 else []
    batches = [masked(32), masked(1)]
    assert train_step(trainer, batches, lr=0.0).loss == pytest.approx(72 / 33, rel=1e-15)


def masked(trained: int) -> Microbatch:
    """Two sequences of 16 tokens of which `trained` count."""
    labels = torch.full((32,), -100)
    labels[:trained] = 1
    return Microbatch(torch.ones(2, 16, dtype=torch.int64), labels.view(2, 16))


@pytest.mark.parametrize(("norm", "why"), [(0.0, "no token is trained on"), (float("nan"), "gradients are not finite")])
def test_the_console_says_why_a_step_was_skipped(norm, why):
    """N02, O07."""
    record = {"step": 1, "loss": 0.0, "grad_norm": norm, "lr": 0.1, "tokens_per_s": 1.0, "mfu": None, "skipped": True}
    assert step_line(record, 5, eta_s=1.0).endswith(f"SKIPPED: {why}")
