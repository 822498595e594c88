"""Recompute by ranges of blocks: what is kept, equal bits with dropout, rules, the shrunk twin of a config."""

import pytest
import torch

from megalite.config.load import check
from megalite.mesh import single_device_mesh
from megalite.train.step import train_step
from megalite.verify.shrink import shrink
from tests.dist.fault_tools import make_trainer, settings_of
from tests.dist.layouts import RECOMPUTE_LIST, global_batch
from tests.dist.test_layouts import own_microbatches
from tests.unit.model_tools import GPT, LLAMA, make_batch, make_config, make_stages


def kept_bytes(model, ops) -> list[int]:
    """What the forward of block 0 and of block 1 keeps, when `ops` are those of block 1."""
    recompute = [{"layers": [1, 2], "ops": ops}] if ops else "none"
    (stage,) = make_stages(make_config(model, dtype="fp32", recompute=recompute), single_device_mesh())
    batch, found = make_batch(make_config(model)), []
    x = stage.links[0](None, batch)
    for block in stage.links[1:3]:
        x = x.detach().requires_grad_()
        storages, held = {}, []

        def pack(tensor, storages=storages, held=held):
            held.append(tensor)
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            x = block(x, batch)
        found.append(sum(storages.values()))
    return found


@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt"])
def test_each_op_keeps_less_in_its_block_only(model):
    plain = kept_bytes(model, None)
    freed = {ops: [a - b for a, b in zip(plain, kept_bytes(model, ops), strict=True)] for ops in ("activation", "mlp")}
    freed["attention"] = [a - b for a, b in zip(plain, kept_bytes(model, ["attention"]), strict=True)]
    rows, ffn = 32, 48
    assert all(first == 0 for first, _ in freed.values()), "block 0 is in no range"
    assert freed["activation"][1] == rows * ffn * 4
    assert freed["mlp"][1] > freed["activation"][1]
    assert freed["attention"][1] > 0


def one_step(overrides):
    settings = settings_of(overrides)
    trainer = make_trainer(settings)
    result = train_step(trainer, own_microbatches(trainer.config, 0, global_batch(settings, "uneven", 0), 0), lr=0.01)
    return trainer, [result.loss, result.grad_norm, *(unit.grad for unit in trainer.zero.units.values())]


def test_a_list_replays_dropout_to_the_bit():
    """`full` of block 1 and ops of 0 and 3; block 2 keeps everything."""
    dropout = "model.dropout=0.2 model.attention_dropout=0.2"
    _, plain = one_step(dropout)
    trainer, again = one_step(f"{dropout} {RECOMPUTE_LIST}")
    assert plain[:2] == again[:2]
    assert all(torch.equal(a, b) for a, b in zip(plain[2:], again[2:], strict=True))
    (stage,) = trainer.stages
    assert [getattr(link, "recomputes", False) for link in stage.links] == [False, False, True, False, False, False]
    assert [block.mlp.again for block in stage.links[1:5]] == [{"attention", "mlp"}, {"full"}, set(), {"activation"}]


@pytest.mark.parametrize(
    ("recompute", "match"),
    [
        ([], "names no blocks; use recompute=none"),
        ([{"layers": [0, 5], "ops": "full"}], "ends after model.num_layers=4; use at most 4"),
        ([{"layers": [2, 2], "ops": "full"}], r"layers=\[2, 2\] is empty.*use e.g. \[2, 3\]"),
        ([{"layers": [0, 2], "ops": "mlp"}, {"layers": [1, 3], "ops": "full"}], "both name block 1"),
        ([{"layers": [0, 2], "ops": []}], "names no op"),
        ([{"layers": [0, 2], "ops": ["mlp", "mlp"]}], "names an op twice"),
        ([{"layers": [0, 2], "ops": ["mlp", "activation"]}], "use one of the two"),
        ([{"layers": [0, 2], "ops": ["full", "mlp"]}], "use full alone"),
        ([{"layers": [0, 2], "ops": ["norm"]}], r"recompute\[0\].ops\[0\]=norm must be attention, activation, mlp"),
        ([{"layers": [0, 2]}], r"recompute\[0\].ops is missing"),
    ],
)
def test_wrong_inputs(recompute, match):
    with pytest.raises(ValueError, match=match):
        check(settings_of("") | {"recompute": recompute}, {}, name="x")


def test_words_and_lists_say_the_same():
    words = {"selective": "selective", "full": "full"}
    for word, ops in words.items():
        by_word = check(settings_of(f"recompute={word}"), {}, name="x")
        by_list = check(settings_of("") | {"recompute": [{"layers": [0, 4], "ops": ops}]}, {}, name="x")
        assert [by_word.recompute_ops(i) for i in range(4)] == [by_list.recompute_ops(i) for i in range(4)]


def test_the_shrunk_twin_has_every_combination_of_ops():
    config = check(settings_of(f"model.num_layers=8 mesh.pp=2 {RECOMPUTE_LIST}"), {}, name="x")
    small = shrink(config, "fp64").layout
    wanted = {config.recompute_ops(layer) for layer in range(8)}
    assert {small.recompute_ops(layer) for layer in range(small.model.num_layers)} == wanted
