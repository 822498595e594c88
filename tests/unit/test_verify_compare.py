"""The comparison of records: what comes first, which ranks hold it, what counts as rounding."""

import math
from copy import deepcopy
from itertools import pairwise

import pytest
import torch

from megalite.config.load import load_config
from megalite.config.schema import Config
from megalite.verify.bounds import Bounds, bounds, distance, norm, relative_bound, unit_roundoff
from megalite.verify.compare import (
    Comparison,
    Difference,
    backward_order,
    compare,
    holders,
    place_of,
    worst_index,
)
from megalite.verify.report import describe, failure
from megalite.verify.run import RankReport, Record, StepRecord
from megalite.verify.shrink import shrink

NAMES = ("embedding.word.weight", "layers.0.mlp.down.weight", "layers.1.mlp.down.weight", "head.weight")
ALLOWED = Bounds(1e-12, ((0.0, 1e-11), (1e-11, 1e-10)))


def record(seed: int = 0) -> Record:
    """Two steps of four matrices."""
    generator = torch.Generator().manual_seed(seed)

    def tensors():
        return {name: torch.randn(4, 6, generator=generator, dtype=torch.float64) for name in NAMES}

    numbers = {"loss": 4.0, "grad_norm": 2.0, "valid_tokens": 10.0}
    return Record(tensors(), [StepRecord(dict(numbers), tensors(), tensors()) for _ in range(2)], 3.0)


def reports(ours: Record, num: int = 2) -> list[RankReport]:
    """Rank r holds rows [2r, 2r + 2) of everything."""
    return [
        RankReport(
            rank=rank,
            place=f"tp {rank}",
            scalars=deepcopy(ours.all_scalars),
            holdings=[(name, (2 * rank, 0), (2, 6), 0, 12) for name in NAMES],
            faults=[],
            record=ours if rank == 0 else None,
        )
        for rank in range(num)
    ]


def compared(change=lambda ours: None) -> tuple[Comparison, list[RankReport]]:
    """The comparison with the same record after `change`."""
    ours = record()
    change(ours)
    return compare(reports(ours), record(), ALLOWED), reports(ours)


@pytest.fixture(scope="module")
def config() -> Config:
    """Two layers on two stages."""
    overrides = ["model.num_layers=2", "pipeline.virtual=1", "pipeline.schedule=1f1b", "mesh.dp=1", "mesh.tp=1"]
    return load_config("gpt_tiny_cpu", [*overrides, "batch.micro_batch_size=1"])


def test_equal_records_are_equal():
    result, _ = compared()
    assert result.equal
    assert {row.what: row.num for row in result.rows.values()} == {
        "initial weights": 4, "loss": 2, "valid tokens": 2, "gradient": 8, "grad norm": 2, "update": 8, "weights": 8,
        "eval loss": 1,
    }  # fmt: skip


def test_the_first_gradient_is_the_nearest_to_the_head():
    def change(ours):
        ours.steps[0].grads["layers.0.mlp.down.weight"][1, 2] += 1e-6
        ours.steps[0].grads["layers.1.mlp.down.weight"][3, 4] += 1e-9
        ours.steps[0].grads["embedding.word.weight"] += 1.0

    result, ranks = compared(change)
    first = result.differences[0]
    assert (first.what, first.name, first.step, first.index) == ("gradient", "layers.1.mlp.down.weight", 0, (3, 4))
    assert 1e-11 < first.error < 1e-9
    assert first.bound == 1e-12
    assert [report.rank for report in holders(first, ranks)] == [1]
    assert result.rows["gradient"].num_wrong == 3


def test_the_loss_comes_before_gradients_and_the_first_tensor_is_named_too(config):
    def change(ours):
        ours.steps[0].scalars["loss"] += 1e-6
        ours.steps[0].grads["head.weight"][0, 5] += 1e-6

    result, ranks = compared(change)
    text = failure("fp64", result, config, ranks)
    assert text.splitlines()[0].startswith("fp64: first difference: loss of step 1 differs by 2.50e-07 relative")
    assert "first tensor that differs: gradient of head.weight (head, stage 1) of step 1" in text
    assert text.splitlines()[1].endswith("worst at [0, 5], held by rank 0 (tp 0)")


def test_what_grows_is_allowed_to_and_no_more():
    def change(by):
        def shift(ours):
            ours.steps[1].grads["head.weight"][0, 0] += by

        return shift

    assert compared(change(8e-12))[0].equal
    assert not compared(change(4e-11))[0].equal


def test_nan_is_a_difference():
    def change(ours):
        ours.steps[1].weights["head.weight"][2, 1] = math.nan

    first = compared(change)[0].differences[0]
    assert (first.what, first.step, first.index) == ("update", 1, (2, 1))
    assert math.isnan(first.error)

    def no_loss(ours):
        ours.eval_loss = math.nan

    assert compared(no_loss)[0].differences[0].what == "eval loss"


def test_initial_weights_and_tokens_are_equal_to_the_bit():
    def weights(ours):
        ours.initial["head.weight"][0, 0] *= 1 + 1e-15

    def tokens(ours):
        ours.steps[0].scalars["valid_tokens"] += 1

    assert compared(weights)[0].differences[0].what == "initial weights"
    assert compared(tokens)[0].differences[0].what == "valid tokens"


def test_a_missing_tensor_is_named():
    def change(ours):
        del ours.initial["layers.1.mlp.down.weight"]

    assert compared(change)[0].faults == ["1 tensors are on no rank: layers.1.mlp.down.weight"]


def test_ranks_that_disagree_are_named():
    ours = record()
    of_ranks = reports(ours)
    of_ranks[1].scalars[1]["grad_norm"] = math.nextafter(2.0, 3.0)
    result = compare(of_ranks, record(), ALLOWED)
    assert result.differences == []
    assert result.faults == [
        "ranks disagree on the grad norm of step 2: rank 0 (tp 0) 2.0, rank 1 (tp 1) 2.0000000000000004"
    ]


def test_what_a_rank_complains_of_is_passed_on_once():
    of_ranks = reports(record())
    for report in of_ranks:
        report.faults.append("copies differ")
    assert compare(of_ranks, record(), ALLOWED).faults == ["rank 0 (tp 0): copies differ"]


def test_a_tensor_far_below_its_share_is_compared_on_that_scale():
    def change(ours):
        ours.steps[0].grads["head.weight"][0, 0] += 1e-14

    ours, theirs = record(), record()
    for each in (ours, theirs):
        each.steps[0].grads["head.weight"].zero_()
    change(ours)
    assert compare(reports(ours), theirs, ALLOWED).equal


def test_backward_order():
    names = [
        "embedding.word.weight", "layers.0.attention.q.weight", "layers.10.attention_norm.weight",
        "layers.10.attention.out.weight", "layers.10.mlp.gate.weight", "layers.10.mlp_norm.weight",
        "layers.10.mlp.down.bias", "layers.2.mlp.down.weight", "final_norm.weight", "head.weight",
    ]  # fmt: skip
    assert backward_order(names) == [
        "head.weight", "final_norm.weight", "layers.10.mlp.down.bias", "layers.10.mlp.gate.weight",
        "layers.10.mlp_norm.weight", "layers.10.attention.out.weight", "layers.10.attention_norm.weight",
        "layers.2.mlp.down.weight", "layers.0.attention.q.weight", "embedding.word.weight",
    ]  # fmt: skip


def test_holdings_of_a_part_of_a_box():
    difference = Difference(0, "gradient", "head.weight", 1.0, 0.0, (3, 1))
    report = reports(record(), 1)[0]
    for offset, length, held in ((0, 8, True), (7, 1, True), (8, 4, False), (0, 7, False)):
        report.holdings = [("head.weight", (2, 0), (2, 6), offset, length)]  # element 1 * 6 + 1 of the box
        assert bool(holders(difference, [report])) == held


def test_places(config):
    assert place_of("layers.1.mlp.up.weight", config) == "layer 1, stage 1"
    assert place_of("embedding.word.weight", config) == "embedding, stage 0"
    assert place_of("final_norm.weight", config) == "head, stage 1"
    difference = Difference(2, "weights", "layers.0.mlp.up.weight", 1e-3, 1e-9, (0, 0))
    assert describe(difference, config, []).startswith("weights of layers.0.mlp.up.weight (layer 0, stage 0) of step 3")


def test_worst_index():
    assert worst_index(torch.tensor([[0.0, -3.0], [2.0, 1.0]])) == (0, 1)
    assert worst_index(torch.tensor([[0.0, -3.0], [math.nan, 1.0]])) == (1, 0)
    assert worst_index(torch.tensor(1.0)) == ()


def test_the_bound_of_rounding():
    layouts = {compute: shrink(load_config("gpt_tiny_cpu"), compute).layout for compute in ("fp64", "fp32")}
    assert unit_roundoff(torch.float64) == 2.0**-53
    fp64, fp32 = relative_bound(layouts["fp64"]), relative_bound(layouts["fp32"])
    assert fp64 == 2 * 2.0**-53 * 256**0.5 * 2 * (12 * 8 + 6)  # 16 sequences of 16 rows are the longest sum
    assert fp32 / fp64 == pytest.approx(2.0**29)
    rounded = load_config("gpt_tiny_cpu", ["precision.reduce=bf16", "precision.compute=fp32"])
    assert relative_bound(shrink(rounded, "fp32").layout) == fp32 + 2 * 2.0**-8 * 2  # two summands


def test_bounds_grow_from_step_to_step_and_stay_below_a_fault():
    layout = shrink(load_config("gpt_tiny_cpu"), "fp64").layout
    reference = record()
    result = bounds(layout, reference)
    assert result.steps[0][0] == 0.0
    for (grads, weights), (later_grads, later_weights) in pairwise(result.steps):
        assert later_grads > grads
        assert later_weights > weights
    curvature = distance(reference.steps[1].grads, reference.steps[0].grads) / distance(
        reference.steps[1].weights, reference.steps[0].weights
    )
    assert result.steps[1][0] == pytest.approx(curvature * result.steps[0][1])
    assert result.steps[-1][1] / norm(reference.steps[-1].weights) < 1e-10
