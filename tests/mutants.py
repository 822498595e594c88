"""Planted faults: what is broken, how, on which layout it shows, and what catches it.

A mutant is a context manager that patches megalite inside the rank processes; nothing in the package knows of it. Most
break a layout only, and `verify`, which compares with one device, must see them. Those with `caught_by="oracle"` break
every layout alike, so only the oracle, which shares no code with megalite, can.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest.mock import patch

import torch

from megalite.batch import IGNORE, Microbatch
from megalite.comm.pieces import RowGather
from megalite.model import gpt, stage
from megalite.model.positions import RopeTables
from megalite.optim import norm
from megalite.optim.optimizer import ShardOptimizer
from megalite.parallel.pp.actions import Action, Op
from megalite.parallel.pp.runtime import PipelineRuntime
from megalite.parallel.tp import begun
from megalite.parallel.tp.rows import TensorParallel
from megalite.parallel.zero import manager
from megalite.parallel.zero.manager import ZeroManager
from megalite.parallel.zero.reduce import Pending, Reducer
from megalite.parallel.zero.unit import Unit
from megalite.train import build, step

VERIFY_LAYOUTS = {
    "tp2": "mesh.tp=2 model.num_layers=2",
    "tp2-chunked": "mesh.tp=2 model.num_layers=2 overlap.backend=chunked overlap.chunks=2",
    "tp2-parts": "mesh.tp=2 model.num_layers=2 overlap.backend=chunked batch.micro_batch_size=2 model.dropout=0.1",
    "tp2-kv1": "mesh.tp=2 model.num_layers=2 model.num_kv_heads=1",
    "tp2-dropout": "mesh.tp=2 model.num_layers=2 model.dropout=0.1",
    "dp2-zero1": "mesh.dp=2 zero.stage=1 model.num_layers=2",
    "dp2-zero2": "mesh.dp=2 zero.stage=2 model.num_layers=2",
    "dp2-zero3-dropout": "mesh.dp=2 zero.stage=3 model.num_layers=2 model.dropout=0.1",
    "pp2-tied": "mesh.pp=2 model.num_layers=2 model.tie_embeddings=true",
    "pp2-interleaved": "mesh.pp=2 model.num_layers=4 pipeline.schedule=interleaved pipeline.virtual=2",
}
"""Overrides of tests.dist.layouts.BASE, as small as the faults allow."""


@dataclass(frozen=True)
class Mutant:
    """One fault.

    apply:   makes the context manager that plants it.
    layout:  a key of VERIFY_LAYOUTS; of tests.dist.layouts.LAYOUTS for the oracle's.
    expect:  what the report of the first difference says.
    poison:  needs the non-finite step at the end.
    """

    apply: Callable[[], AbstractContextManager]
    layout: str
    expect: str
    caught_by: Literal["verify", "oracle"] = "verify"
    poison: bool = False


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], AbstractContextManager]:
    """Plant make(original) in the place of owner.name."""
    return lambda: patch.object(owner, name, make(getattr(owner, name)))


def without_reduction_over(axis: str):
    """Gradients that each rank of an axis saw in part stay partial."""

    def make(original):
        def reduce_runs(self, group, keep, *, site):
            if group.axis != axis:
                original(self, group, keep, site=site)

        return reduce_runs

    return replaced(ZeroManager, "_reduce_runs", make)


def averaged_again(original):
    """Gradients were scaled by the token count of all ranks; the sum over dp is divided once more."""

    def finish_grads(self):
        original(self)
        for unit in self.units.values():
            unit.grad.div_(self.mesh.dp.size)

    return finish_grads


def mean_of_means(original):
    """Each microbatch's loss is averaged over its own tokens, then these over microbatches and ranks."""

    def forward(self, action, state):
        original(self, action, state)
        grad = state.inputs.get(Action(Op.B, action.stage, action.mb))
        if action.stage == self.lowered.schedule.num_stages - 1 and state.train:
            valid = int((state.batches[action.mb].labels != IGNORE).sum())
            grad.fill_(1.0 / (max(valid, 1) * len(state.batches) * self.mesh.dp.size))

    return forward


def without_last_layer(original):
    """The last stage ends one block early."""

    def build_stage(index, bounds, *rest):
        return original(index, (*bounds[:-1], (bounds[-1][0], bounds[-1][1] - 1)), *rest)

    return build_stage


def labels_swapped(original):
    """The first two microbatches have each other's labels."""

    def run(self, batches, **options):
        first, second, *others = batches
        swapped = [replace(first, labels=second.labels), replace(second, labels=first.labels), *others]
        return original(self, swapped, **options)

    return run


def stays_gathered(self):
    """After an update only the own shard of the gathered parameters is new."""
    assert self.shard is self.main, "in float64 the optimizer's numbers are the shard"


def padding_in_the_loss(original):
    """The columns of vocabulary padding take part in the softmax: the head takes them for tokens."""

    def forward(self, x, batch):
        context = self.context
        model = context.model.model_copy(update={"vocab_size": context.padded_vocab})
        self.context = replace(context, model=model)
        loss = original(self, x, batch)
        self.context = context
        return loss

    return forward


def every_other_lost(original):
    """Of the reductions of a unit every other one is dropped."""
    count: dict[str, int] = {}

    def finish(self):
        self.work.wait()
        count[self.unit.name] = count.get(self.unit.name, 0) + 1
        if count[self.unit.name] % 2:
            self.result.zero_()
        original(self)

    return finish


def reduced_in_bf16(original):
    """Gradients are rounded to bf16 for the reduction over dp."""
    return lambda **fields: original(**fields | {"reduce": torch.bfloat16})


def clipped_by_local_norm(original):
    """Each rank clips by the norm of what it holds."""

    def update(self, lr, **options):
        local = math.sqrt(norm.local_square_sum(self.zero))
        original(self, lr, **options | {"scale": norm.clip_factor(local, self.config.clip_norm)})

    return update


class Restarting(RopeTables):
    """Positions restart in mid-sequence. (A constant offset would be no fault: rope sees distances only.)"""

    def get(self, seq_len, device):
        """cos and sin (S, H/2)."""
        return tuple(table[torch.arange(seq_len) % (seq_len // 2)] for table in super().get(seq_len, device))


def rope_restarts_on_later_ranks(original):
    """`Restarting` tables on the second of two pipeline ranks, which holds the odd stages."""

    def build_stage(index, bounds, context, rope_tables):
        return original(index, bounds, context, Restarting(**vars(rope_tables)) if index % 2 else rope_tables)

    return build_stage


def dropout_of_local_samples(original):
    """The mask is drawn from the index within the microbatch, not within the global batch."""
    return lambda x, name, *, context, batch: original(x, name, context=context, batch=replace(batch, sample_start=0))


def parts_drop_alike(original):
    """Every part of a microbatch draws the mask of the first."""
    return lambda self, num: [replace(part, sample_start=self.sample_start) for part in original(self, num)]


def read_too_early(original):
    """In backward nobody waits for a sum over tp that was begun: a rank finds there what it has put in itself."""

    def start_reduce_rows(partial, tp, *, site):
        own = partial.chunk(tp.size)[tp.rank].clone()
        work, result = original(partial, tp, site=site)
        if site.endswith("backward"):
            work.wait()  # behind it the message is nobody's
            result.copy_(own)
        return work, result

    return start_reduce_rows


def skipped_by_rank_0_only(original):
    """A non-finite step is noticed on the rank that saw it, and the others update."""

    def compute_grads(trainer, *rest, **options):
        result = original(trainer, *rest, **options)
        return replace(result, skipped=result.skipped and trainer.mesh.rank == 0)

    return compute_grads


def one_step_ahead(original):
    """Bias correction uses a count that is one too high."""

    def update(self, lr, **options):
        self.step_count += 1
        original(self, lr, **options)
        self.step_count -= 1

    return update


def everything_decays(original):
    """Weight decay does not look at the kind of parameter."""

    def slices(self, unit):
        return [replace(s, decay=self.config.weight_decay) for s in original(self, unit)]

    return slices


def tied_grads_not_summed(original):
    """The two ends of the pipeline keep their own gradients of the tied embedding."""

    def all_reduce(tensor, group, **options):
        return None if options["site"] == "zero.tied" else original(tensor, group, **options)

    return all_reduce


def tokens_of_own_rank(original):
    """The token count is not summed over dp."""
    return lambda trainer, batches: sum(int((batch.labels != IGNORE).sum()) for batch in batches)


def never_zeroed(original):
    """Gradients of the last step stay."""
    return lambda self: None


MUTANTS = {
    "norm-grads-not-reduced-over-tp": Mutant(
        without_reduction_over("tp"), "tp2", "gradient of final_norm.weight (head, stage 0) of step 1"
    ),
    "kv-grads-not-reduced-over-replicas": Mutant(
        without_reduction_over("kv"), "tp2-kv1", "gradient of layers.1.attention.k.weight (layer 1, stage 0) of step 1"
    ),
    "tied-counted-twice-in-norm": Mutant(
        replaced(norm, "counted", lambda _: lambda run: run.part.replica == 0),
        "pp2-tied",
        "first difference: grad norm of step 1",
    ),
    "replicas-counted-twice-in-norm": Mutant(
        replaced(norm, "counted", lambda _: lambda run: not run.slot.spec.tied_copy),
        "tp2",
        "first difference: grad norm of step 1",
    ),
    "gradients-averaged-twice": Mutant(
        replaced(ZeroManager, "finish_grads", averaged_again),
        "dp2-zero2",
        "gradient of head.weight (head, stage 0) of step 1 differs by 5.00e-01",
    ),
    "mean-of-microbatch-means": Mutant(
        replaced(PipelineRuntime, "_forward", mean_of_means),
        "pp2-tied",
        "gradient of final_norm.weight (head, stage 1) of step 1",
    ),
    "tokens-of-own-rank-only": Mutant(
        replaced(step, "count_valid_tokens", tokens_of_own_rank), "dp2-zero2", "first difference: loss of step 1"
    ),
    "last-layer-dropped": Mutant(
        replaced(stage, "_build_stage", without_last_layer),
        "pp2-interleaved",
        "9 tensors are on no rank: layers.3.attention_norm.weight",
    ),
    "labels-of-two-microbatches-swapped": Mutant(
        replaced(PipelineRuntime, "run", labels_swapped), "pp2-tied", "first difference: loss of step 1"
    ),
    "stale-gathered-parameters": Mutant(
        replaced(Unit, "updated", lambda _: stays_gathered), "dp2-zero1", "first difference: loss of step 2"
    ),
    "vocab-padding-not-masked": Mutant(
        replaced(gpt.HeadLink, "forward", padding_in_the_loss), "tp2", "first difference: loss of step 1"
    ),
    "microbatch-gradient-lost": Mutant(
        replaced(Pending, "finish", every_other_lost), "dp2-zero2", "gradient of head.weight (head, stage 0) of step 1"
    ),
    "reduced-in-bf16": Mutant(
        replaced(build, "ZeroPolicy", reduced_in_bf16), "dp2-zero1", "gradient of head.weight (head, stage 0) of step 1"
    ),
    "clipped-by-local-norm": Mutant(
        replaced(ShardOptimizer, "update", clipped_by_local_norm),
        "dp2-zero1",
        "first difference: update of head.weight (head, stage 0) of step 1",
    ),
    "rope-restarts-on-later-stages": Mutant(
        replaced(stage, "_build_stage", rope_restarts_on_later_ranks),
        "pp2-interleaved",
        "first difference: loss of step 1",
    ),
    "dropout-of-local-rows": Mutant(
        replaced(TensorParallel, "row_start", lambda _: lambda self, num_rows: 0),
        "tp2-dropout",
        "first difference: loss of step 1",
    ),
    "dropout-of-local-samples": Mutant(
        replaced(gpt, "residual_dropout", dropout_of_local_samples),
        "dp2-zero3-dropout",
        "first difference: loss of step 1",
    ),
    "dropout-of-parts-alike": Mutant(
        replaced(Microbatch, "parts", parts_drop_alike), "tp2-parts", "first difference: loss of step 1"
    ),
    "begun-sum-read-too-early": Mutant(
        replaced(begun, "start_reduce_rows", read_too_early),
        "tp2-parts",
        "gradient of final_norm.weight (head, stage 0) of step 1",
    ),
    "weight-gradient-of-own-rows-only": Mutant(
        replaced(RowGather, "others", lambda _: lambda self: []),
        "tp2-chunked",
        "gradient of layers.1.mlp.down.weight (layer 1, stage 0) of step 1",
    ),
    "skip-on-one-rank-only": Mutant(
        replaced(step, "compute_grads", skipped_by_rank_0_only),
        "tp2",
        "rank 1 (tp 1): a step with a NaN on rank 0 was not skipped",
        poison=True,
    ),
    "tied-gradients-not-summed": Mutant(
        replaced(manager, "all_reduce", tied_grads_not_summed),
        "pp2-tied",
        "gradient of embedding.word.weight (embedding, stage 0 (tied to the head, stage 1)) of step 1",
    ),
    "step-counter-one-ahead": Mutant(
        replaced(ShardOptimizer, "update", one_step_ahead), "one-rank", "step 1 loss", "oracle"
    ),
    "decay-on-norms": Mutant(
        replaced(ShardOptimizer, "_slices", everything_decays), "one-rank", "step 1 loss", "oracle"
    ),
    "gradients-never-zeroed": Mutant(
        replaced(Reducer, "begin_step", never_zeroed), "one-rank", "step 1 grad_norm", "oracle"
    ),
}
