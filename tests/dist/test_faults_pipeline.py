"""Faults of pipelines: microbatches of other sizes, few of them, repeated runs, messages between the same two ranks,
labels of another microbatch. Loss and gradients equal the oracle's over the same microbatches."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megalite.batch import IGNORE, Microbatch
from megalite.parallel.pp.runtime import MAX_SENDS, PipelineRuntime
from megalite.train.evaluate import evaluate
from megalite.train.logical import full_grads, full_params
from megalite.train.step import compute_grads, train_step
from tests.dist.fault_tools import assert_same, make_microbatch, make_trainer, oracle_grads, settings_of
from tests.dist.layouts import EIGHT, GPT, INTERLEAVED, global_batch
from tests.dist.pool import run_ranks
from tests.dist.test_layouts import own_microbatches

VOCAB = 101
SIZES = [(1, 9), (2, 16), (1, 5), (3, 12)]
"""(B, S) of the microbatches of one rank; none of the model's positions from 12 on is in all of them."""


def odd_batches(seed: int = 0) -> list[Microbatch]:
    """Microbatches of unequal sizes; in the third no label is trained on."""
    batches = [make_microbatch(B, S, seed=seed + i, vocab_size=VOCAB) for i, (B, S) in enumerate(SIZES)]
    batches[2] = replace(batches[2], labels=torch.full_like(batches[2].labels, IGNORE))
    return batches


def grads_of(rank: int, world: int, settings: dict[str, Any], batches: list[list[Microbatch]], repeats: int = 1):
    """Initial weights, then (loss, gradients) of `repeats` equal steps on `batches[dp rank]`."""
    trainer = make_trainer(settings)
    own = batches[trainer.mesh.dp.rank]
    found = []
    for _ in range(repeats):
        result = compute_grads(trainer, own)
        found.append((result.loss, full_grads(trainer)))
    return full_params(trainer), found


def check(world: int, overrides: str, batches: list[list[Microbatch]], *, repeats: int = 1) -> None:
    """Every rank reports the oracle's loss and gradients, in each of the repeated steps the same bits."""
    settings = settings_of(f"{overrides} batch.num_microbatches={len(batches[0])} batch.global_batch_size=null")
    results = run_ranks(world, grads_of, settings, batches, repeats)
    initial = results[0][0]
    loss, grads = oracle_grads(initial, settings, [batch for own in batches for batch in own])
    for _, steps in results:
        for step_loss, step_grads in steps:
            assert step_loss == pytest.approx(loss, rel=1e-12)
            assert all(torch.equal(step_grads[name], steps[0][1][name]) for name in grads)
    assert_same(results[-1][1][0][1], grads)


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (2, f"mesh.pp=2 {GPT}"),
        (2, f"mesh.pp=2 {INTERLEAVED}"),
        (4, f"mesh.pp=4 {GPT} recompute=full"),
        (4, f"mesh.pp=2 mesh.tp=2 mesh.sequence_parallel=false {GPT}"),
    ],
)
def test_microbatches_of_any_size(world, overrides):
    """L03, L06, L10: each microbatch has another length and batch; no shape is taken from the first one."""
    check(world, overrides, [odd_batches()])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_values_that_few_microbatches_reach(stage):
    """Z01: position rows that one microbatch of one rank reads, microbatches without any trained label."""
    check(2, f"mesh.dp=2 zero.stage={stage} {GPT}", [odd_batches(), odd_batches(10)])


@pytest.mark.parametrize(
    ("schedule", "num_microbatches"), [("gpipe", 1), ("gpipe", 5), ("1f1b", 1), ("1f1b", 3), ("1f1b", 9)]
)
def test_any_number_of_microbatches(schedule, num_microbatches):
    """L04: fewer microbatches than stages, and more; the lowering proof covers all other numbers."""
    batches = [make_microbatch(1, 8, seed=i, vocab_size=VOCAB) for i in range(num_microbatches)]
    check(4, f"mesh.pp=4 pipeline.schedule={schedule}", [batches])


@pytest.mark.parametrize("num_microbatches", [4, 6])
def test_two_ranks_that_send_both_ways(num_microbatches):
    """L05: at pp=2 both neighbours are the same rank; ten runs end and give the same bits."""
    batches = [make_microbatch(1, 8, seed=i, vocab_size=VOCAB) for i in range(num_microbatches)]
    check(2, f"mesh.pp=2 {INTERLEAVED}", [batches], repeats=10)


def test_interleaved_chunks_on_four_ranks():
    """L04, L05: two chunks a rank, wrapping around from the last rank to the first."""
    batches = [make_microbatch(1, 8, seed=i, vocab_size=VOCAB) for i in range(8)]
    check(4, f"mesh.pp=4 {EIGHT} {INTERLEAVED}", [batches], repeats=2)


def test_the_same_batch_twice_is_the_same_mean():
    """L02, N01: accumulating one microbatch twice gives its own gradient, neither double nor decayed."""
    batch = make_microbatch(1, 16, seed=3, vocab_size=VOCAB)
    settings = settings_of("mesh.pp=2 batch.global_batch_size=1")
    ((_, [(loss, once)]), _) = run_ranks(2, grads_of, settings, [[batch]])
    twice = settings_of("mesh.pp=2 batch.global_batch_size=2")
    ((_, [(twice_loss, both)]), _) = run_ranks(2, grads_of, twice, [[batch, batch]])
    assert twice_loss == pytest.approx(loss, rel=1e-14)
    assert_same(both, once, 1e-14)


def losses_of(rank: int, world: int, settings: dict[str, Any], batches: list[Microbatch]):
    """The loss sum of each microbatch, and the first token and label that the embedding and the head were given."""
    trainer = make_trainer(settings)
    seen: dict[str, list[tuple[int, int]]] = {}

    def note(link: torch.nn.Module, args: tuple, _: object) -> None:
        batch = args[1]
        seen.setdefault(type(link).__name__, []).append((int(batch.tokens[0, 0]), int(batch.labels[0, 0])))

    for link in (link for stage in trainer.stages for link in stage.links):
        link.register_forward_hook(note)
    trainer.zero.begin_step()
    losses = trainer.runtime.run(batches, loss_grad=1.0)
    trainer.zero.finish_grads()
    return [float(loss) for loss in losses], seen.get("EmbeddingLink"), seen.get("HeadLink")


@pytest.mark.parametrize("overrides", ["mesh.pp=2", f"mesh.pp=2 {INTERLEAVED}", "mesh.pp=2 pipeline.schedule=gpipe"])
def test_labels_belong_to_the_microbatch(overrides):
    """L13: microbatch k holds token k and label k; each loss is the one that a single rank computes for it."""
    ones = torch.ones(1, 8, dtype=torch.int64)
    batches = [Microbatch(k * ones, k * ones) for k in range(6)]
    number = "batch.global_batch_size=6"
    ((want, _, _),) = run_ranks(1, losses_of, settings_of(number), batches)
    (none, tokens, _), (found, _, labels) = run_ranks(2, losses_of, settings_of(f"{overrides} {number}"), batches)
    assert none == []
    assert len({round(loss, 6) for loss in want}) == 6, "the losses must tell microbatches apart"
    assert found == pytest.approx(want, rel=1e-12)
    assert tokens == labels == [(k, k) for k in range(6)]


def train_and_evaluate(rank: int, world: int, settings: dict[str, Any], held_out: list[Microbatch]):
    """Train, evaluate on other sizes, train on; the evaluation's loss and the weights."""
    trainer = make_trainer(settings)
    losses = []
    for step in range(3):
        batches = [make_microbatch(2, 8, seed=10 * step + i, vocab_size=VOCAB) for i in range(4)]
        losses.append(train_step(trainer, batches, lr=0.01).loss)
        if held_out:
            losses.append(evaluate(trainer, [held_out]))
            losses.append(evaluate(trainer, [held_out]))
    return losses, full_params(trainer)


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (2, "mesh.pp=2"),
        (2, f"mesh.pp=2 {INTERLEAVED}"),
        (4, "mesh.pp=2 mesh.dp=2 zero.stage=3 zero.reshard_after=step"),
    ],
)
def test_evaluation_between_steps(world, overrides):
    """L11, K06, Z08: evaluation right after an update, on another batch size and length, sees the new weights and
    leaves training as it was, bit for bit."""
    batch = "batch.micro_batch_size=2 batch.num_microbatches=4 batch.global_batch_size=null"
    held_out = [make_microbatch(8, 12, seed=99 + i, vocab_size=VOCAB) for i in range(4)]
    ((want, _),) = run_ranks(1, train_and_evaluate, settings_of(batch), held_out)
    results = run_ranks(world, train_and_evaluate, settings_of(f"{overrides} {batch}"), held_out)
    plain = run_ranks(world, train_and_evaluate, settings_of(f"{overrides} {batch}"), [])
    for (losses, params), (train_losses, undisturbed) in zip(results, plain, strict=True):
        assert losses == pytest.approx(want, rel=1e-10)
        assert losses[1::3] == losses[2::3]
        assert losses[0::3] == train_losses
        assert all(torch.equal(params[name], undisturbed[name]) for name in params)


def kept_sends(rank, world, overrides):
    """The most messages that a pass keeps, and how many it sends."""
    trainer = make_trainer(settings_of(overrides))
    most, sent = [0], [0]
    original = PipelineRuntime._send

    def send(self, action, state):
        original(self, action, state)
        most[0], sent[0] = max(most[0], len(state.sends)), sent[0] + 1

    PipelineRuntime._send = send
    try:
        batches = own_microbatches(trainer.config, 0, global_batch(settings_of(overrides), "full", 0), 0)
        train_step(trainer, batches, lr=0.01)
    finally:
        PipelineRuntime._send = original
    return most[0], sent[0]


@pytest.mark.timeout(60)
def test_sent_buffers_are_let_go_under_the_step():
    """Not all of a step's activations stay until its end, although gloo does not say when a message has left."""
    overrides = "mesh.pp=2 pipeline.schedule=gpipe batch.global_batch_size=16"
    for most, sent in run_ranks(2, kept_sends, overrides, timeout_s=50):
        assert sent == 16
        assert most <= MAX_SENDS <= sent // 2
