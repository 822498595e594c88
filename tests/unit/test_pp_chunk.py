"""The order of what happens around a chunk's links in backward: [Note: the embedding goes first] of pp/chunk.py."""

import pytest
import torch
from torch import Tensor

from megalite.mesh import single_device_mesh
from megalite.parallel.pp.chunk import Chunk
from tests.unit.model_tools import GPT, LLAMA, make_batch, make_config, make_stages, set_main_grads

EMBEDDING, BLOCK = 0, 1


class Noting:
    """Hooks that take notes, and at each reduction look at the weight gradients of the first block."""

    def __init__(self, chunk_links):
        self.links = chunk_links
        self.events: list[str] = []
        self.done_at: dict[int, bool] = {}

    def before_forward(self, position): ...

    def after_forward(self, position): ...

    def before_backward(self, position, weights):
        self.events.append(f"backward {position}{'' if weights else ' without weights'}")

    def after_backward(self, position, weights): ...

    def before_weights(self, position):
        self.events.append(f"weights {position}")

    def reduce(self, position, last):
        self.events.append(f"reduce {position}{' last' if last else ''}")
        if len(self.links) > BLOCK:
            self.done_at[position] = all(param.main_grad.abs().sum() > 0 for param in self.links[BLOCK].parameters())


def run_chunk(reduce: str, *, kept=slice(None), split=False, model=LLAMA, recompute="none"):
    """One forward and backward of the links `kept`; returns the hooks, the input's gradient and all main gradients."""
    config = make_config(model, recompute=recompute)
    (stage,) = make_stages(config, single_device_mesh())
    set_main_grads([stage], torch.float64)
    links = stage.links[kept]
    hooks = Noting(links)
    chunk, batch = Chunk(0, links, hooks), make_batch(config)
    first = kept.start or 0
    x = None if first == 0 else torch.randn(batch.rows, 32, dtype=torch.float64, generator=seeded())
    y = chunk.forward(0, x, batch, train=True)
    if split:
        grad = chunk.backward_input(0, torch.ones_like(y))
        chunk.backward_weights(0, reduce=reduce)
    else:
        grad = chunk.backward(0, torch.ones_like(y), reduce=reduce)
    assert not chunk.deferred
    assert not chunk.in_flight
    assert all(getattr(param, "deferred", None) is None for link in links for param in link.parameters())
    return hooks, grad, [param.main_grad for link in links for param in link.parameters()]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def reduced(hooks: Noting) -> list[str]:
    return [event for event in hooks.events if event.startswith("reduce")]


@pytest.mark.parametrize(("reduce", "suffix"), [("last", " last"), ("part", "")])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_embedding_is_reduced_before_the_first_blocks_weight_gradients_are_made(reduce, suffix, recompute):
    hooks, _, _ = run_chunk(reduce, recompute=recompute)
    assert hooks.events == [
        "backward 3", f"reduce 3{suffix}",
        "backward 2", f"reduce 2{suffix}",
        "backward 1 without weights",
        "backward 0", f"reduce 0{suffix}",
        "weights 1", f"reduce 1{suffix}",
    ]  # fmt: skip
    assert not hooks.done_at[EMBEDDING], "nothing is left to run under the embedding's reduction"
    assert hooks.done_at[BLOCK], "the block is reduced before its gradients are there"


def same(ones: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


@pytest.mark.parametrize("model", [LLAMA | {"bias": True}, GPT], ids=["llama", "gpt"])
def test_gradients_are_the_same_bits_in_either_order(model):
    _, _, plain = run_chunk("no", model=model)
    _, _, late = run_chunk("last", model=model)
    assert all(grad.abs().sum() > 0 for grad in plain)
    assert same(plain, late)


def test_nothing_is_put_off_where_nothing_is_reduced():
    hooks, _, _ = run_chunk("no")
    assert hooks.events == ["backward 3", "backward 2", "backward 1", "backward 0"]


@pytest.mark.parametrize(
    ("kept", "order"),
    [
        (slice(1, None), [2, 1, 0]),  # a later stage: blocks and head
        (slice(1, 3), [1, 0]),
        (slice(3, None), [0]),
        (slice(0, 1), [0]),  # the embedding alone
        (slice(0, 4, 3), [1, 0]),  # embedding and head, no block
    ],
)
def test_chains_that_do_not_begin_with_embedding_and_block_are_reduced_link_by_link(kept, order):
    hooks, grad, grads = run_chunk("last", kept=kept)
    assert hooks.events == [text for i in order for text in (f"backward {i}", f"reduce {i} last")]
    assert (grad is None) == (kept.start in (None, 0))
    assert all(one.abs().sum() > 0 for one in grads)


def test_a_split_backward_has_put_all_blocks_off_already():
    hooks, _, grads = run_chunk("last", split=True)
    assert hooks.events == [
        "backward 3", "backward 2 without weights", "backward 1 without weights", "backward 0",
        "reduce 3 last", "weights 2", "reduce 2 last", "weights 1", "reduce 1 last", "reduce 0 last",
    ]  # fmt: skip
    assert same(grads, run_chunk("no")[2])
