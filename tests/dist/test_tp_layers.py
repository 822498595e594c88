"""The whole model and its layers on 2 and 4 tp ranks: equal to one rank, whatever is sharded, and equal among ranks."""

import math
from dataclasses import replace

import pytest
import torch

from megalite.comm.collectives import all_reduce
from megalite.mesh import Sizes, single_device_mesh
from megalite.model.stage import build_stages
from tests.dist.pool import mesh_for, run_ranks
from tests.unit.model_tools import (
    GPT,
    LLAMA,
    assemble,
    boxes,
    jitter,
    make_batch,
    make_config,
    make_stages,
    params_of,
    run,
    set_main_grads,
)

DROPOUT = {"dropout": 0.3, "attention_dropout": 0.2}
MODELS = {
    "llama": LLAMA,
    "llama_one_kv_head": LLAMA | {"num_kv_heads": 1, "bias": True},
    "llama_tied": LLAMA | {"tie_embeddings": True},
    "llama_head_dim": LLAMA | {"head_dim": 12, "num_kv_heads": 4},
    "gpt": GPT,
    "gpt_gqa": GPT | {"num_kv_heads": 2, "tie_embeddings": False},
    "gpt_dropout": GPT | DROPOUT,
    "llama_dropout": LLAMA | DROPOUT,
}


def reduce_replicated(params, mesh) -> None:
    """What the trainer does once per step: sum partial gradients of replicated parts over the group of tp_reduce."""
    for param in params:
        row = 0
        for part in param.spec.parts:
            box = param.main_grad[row : row + part.shape[0]]
            row += part.shape[0]
            if param.spec.tp_reduce is not None and part.num_replicas > 1:
                all_reduce(box, getattr(mesh, param.spec.tp_reduce))


def train_rank(rank: int, world: int, config, full_recompute: bool = False):
    """Losses, parameters and reduced gradients of this rank's boxes, and the padding of both."""
    mesh = mesh_for(Sizes(tp=config.mesh.tp), config.kv_replicas)
    stages = make_stages(config, mesh)
    jitter(stages)
    set_main_grads(stages, torch.float64)
    losses = run(stages, make_batch(config, start=5), full_recompute=full_recompute)
    reduce_replicated(params_of(stages), mesh)
    assert all(param.grad is None for param in params_of(stages))
    padding = [p.detach()[sum(part.shape[0] for part in p.spec.parts) :] for p in params_of(stages)]
    padding += [p.main_grad[sum(part.shape[0] for part in p.spec.parts) :] for p in params_of(stages)]
    return losses, boxes(stages), boxes(stages, grads=True), sum(p.abs().sum().item() for p in padding)


def train_alone(config):
    """The same on one rank without tp."""
    stages = make_stages(config, single_device_mesh())
    jitter(stages)
    set_main_grads(stages, torch.float64)
    losses = run(stages, make_batch(config, start=5))
    return losses, assemble([boxes(stages)]), assemble([boxes(stages, grads=True)])


def check_replicas(ranks: list) -> None:
    """Every replica of a box holds the same bits."""
    first: dict = {}
    for part, values in (box for rank in ranks for box in rank):
        mine = first.setdefault((part.name, part.start), values)
        assert torch.equal(mine, values), f"{part.name} differs between its replicas"


def check_replica_numbers(ranks: list) -> None:
    """A box that num_replicas ranks hold is numbered 0, 1, ... on them."""
    numbers: dict = {}
    for part, _ in (box for rank in ranks for box in rank):
        numbers.setdefault((part.name, part.start, part.num_replicas), []).append(part.replica)
    for (name, _, num_replicas), replicas in numbers.items():
        assert sorted(replicas) == list(range(num_replicas)), f"{name}: replicas {replicas} of {num_replicas}"


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "no_sp"])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_tp_equals_one_rank(name, tp, sequence_parallel):
    config = make_config(MODELS[name], mesh={"tp": tp, "sequence_parallel": sequence_parallel})
    alone = make_config(MODELS[name])
    losses, params, grads = train_alone(alone)
    results = run_ranks(tp, train_rank, config)
    for result in results:
        torch.testing.assert_close(result[0], losses, rtol=1e-11, atol=1e-13)
        assert torch.equal(result[0], results[0][0]), "the ranks' losses differ"
        assert result[3] == 0.0, "padded rows of the vocabulary are not zero"
    found = assemble([result[1] for result in results])
    assert found.keys() == params.keys()
    assert all(torch.equal(found[key], params[key]) for key in params), "initial values depend on tp"
    check_replicas([result[1] for result in results])
    check_replicas([result[2] for result in results])
    check_replica_numbers([result[1] for result in results])
    found = assemble([result[2] for result in results])
    for key, grad in grads.items():
        torch.testing.assert_close(found[key], grad, rtol=1e-10, atol=1e-12, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_changes_no_bit(recompute):
    model = LLAMA | DROPOUT
    plain = run_ranks(2, train_rank, make_config(model, mesh={"tp": 2}))
    again = run_ranks(2, train_rank, make_config(model, mesh={"tp": 2}, recompute=recompute), recompute == "full")
    for one, two in zip(plain, again, strict=True):
        assert torch.equal(one[0], two[0])
        for (part, a), (_, b) in zip(one[2], two[2], strict=True):
            assert torch.equal(a, b), part.name


def zero_weights_rank(rank: int, world: int, config):
    """Losses with all parameters zero."""
    stages = make_stages(config, mesh_for(Sizes(tp=config.mesh.tp), config.kv_replicas))
    for param in params_of(stages):
        param.data.zero_()
    set_main_grads(stages, torch.float64)
    batch = make_batch(config)
    return run(stages, replace(batch, labels=batch.labels.clamp(min=0)))


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("vocab_size", [101, 5])
def test_padded_columns_have_no_share_in_the_loss(tp, vocab_size):
    config = make_config(LLAMA | {"vocab_size": vocab_size}, mesh={"tp": tp})
    for losses in run_ranks(tp, zero_weights_rank, config):
        torch.testing.assert_close(losses, torch.full_like(losses, math.log(vocab_size)), rtol=1e-14, atol=0.0)


def traffic_rank(rank: int, world: int, config):
    """Bytes sent per (op, site) in one forward and backward."""
    mesh = mesh_for(Sizes(tp=config.mesh.tp), config.kv_replicas)
    stages = make_stages(config, mesh)
    set_main_grads(stages, torch.float64)
    mesh.ledger.reset()
    run(stages, make_batch(config))
    assert {entry.axis for entry in mesh.ledger.sent_bytes} == {"tp"}
    return {(entry.op, entry.site): sent for entry, sent in mesh.ledger.sent_bytes.items()}


def test_traffic_with_sequence_parallel():
    config = make_config(LLAMA, mesh={"tp": 4})
    rows, hidden, blocks = 2 * 16, 32, 2
    one_way = 3 * rows * hidden * 8 // 4  # an all-gather or a reduce-scatter of all rows sends (tp-1)/tp of them
    columns = {f"{name}.{way}": one_way * blocks for name in ("attention.qkv", "mlp.gate_up") for way in ("forward",)}
    expected = {("all_gather", site): sent for site, sent in columns.items()}
    expected |= {("reduce_scatter", site.replace("forward", "backward")): sent for site, sent in columns.items()}
    for name in ("attention.out", "mlp.down"):
        expected[("reduce_scatter", f"{name}.forward")] = one_way * blocks
        expected[("all_gather", f"{name}.backward")] = one_way * blocks
    expected[("reduce_scatter", "embedding.forward")] = expected[("all_gather", "embedding.backward")] = one_way
    expected[("all_gather", "head.forward")] = expected[("reduce_scatter", "head.backward")] = one_way
    expected[("all_reduce", "loss.max")] = 2 * 3 * rows * 8 // 4
    expected[("all_reduce", "loss.sum")] = 2 * 3 * 2 * rows * 8 // 4
    for found in run_ranks(4, traffic_rank, config):
        assert found == expected


def odd_rows_rank(rank: int, world: int, config):
    """The message when the rows of a microbatch can't be shared among the ranks."""
    mesh = mesh_for(Sizes(tp=world))
    with pytest.raises(ValueError, match="30 rows are not divisible by mesh.tp=4") as error:
        run(make_stages(config, mesh), make_batch(config))
    return str(error.value)


def test_odd_rows_are_refused_before_anything_is_sent():
    config = make_config(
        LLAMA | {"num_kv_heads": 4},
        mesh={"tp": 4},
        batch={"global_batch_size": 2, "micro_batch_size": 2, "seq_len": 15},
    )
    assert "mesh.sequence_parallel=false" in run_ranks(4, odd_rows_rank, config)[0]


def test_specs_of_unsharded_rows_ask_for_no_reduction():
    mesh = single_device_mesh()
    for config in (make_config(GPT), make_config(LLAMA)):
        for stage in build_stages(config, mesh, [0]):
            assert all(param.spec.tp_reduce is None for param in stage.parameters())
