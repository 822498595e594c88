"""With parts of a microbatch the collectives of each run under the computation of another, in both passes; told by the
order in which calls and waits begin on a rank, not by times."""

from unittest.mock import patch

import pytest
import torch

from megalite.mesh import Sizes
from megalite.observe.spans import Spans
from megalite.parallel.tp import linear
from tests.dist.pool import mesh_for, run_ranks
from tests.unit.model_tools import GPT, LLAMA, make_batch, make_config, make_stages, run, set_main_grads

ONE_BLOCK = {"num_layers": 1}


def config_of(model: dict, *, sequence_parallel: bool, parts: int, recompute: str = "none"):
    return make_config(
        model | ONE_BLOCK,
        mesh={"tp": 2, "sequence_parallel": sequence_parallel},
        overlap={"backend": "chunked", "batch_parts": parts},
        batch={"global_batch_size": parts, "micro_batch_size": parts},
        recompute=recompute,
    )


def order_of(rank: int, world: int, config) -> list[str]:
    """What one forward and backward does, in order: `SITE.PASS`, `wait SITE.PASS`, `wgrad SITE`."""
    mesh = mesh_for(Sizes(tp=2))
    stages = make_stages(config, mesh)
    set_main_grads(stages, torch.float64)
    original = linear._column_grads
    spans = mesh.ledger.spans = Spans(limit=1000)

    def noted(ctx, dy, full):
        with spans.span(f"wgrad {ctx.layer.site} tp", "update"):
            return original(ctx, dy, full)

    try:
        with patch.object(linear, "_column_grads", noted):
            run(stages, make_batch(config), full_recompute=config.recompute == "full")
    finally:
        mesh.ledger.spans = None
    assert spans.num_dropped == 0
    return [span.name.removesuffix(" tp") for span in spans.take()]


def at(events: list[str], name: str) -> list[int]:
    """Where an event stands."""
    return [index for index, event in enumerate(events) if event == name]


def sites_of(model: dict, *, sequence_parallel: bool) -> set[str]:
    """The collectives of a block, embedding and head, as `SITE.PASS`."""
    wide = "mlp.gate_up" if model["family"] == "llama" else "mlp.up"
    columns, rows = ["attention.qkv", wide, "head"], ["embedding", "attention.out", "mlp.down"]
    gathers = [f"{site}.forward" for site in columns] + [f"{site}.backward" for site in rows]
    sums = [f"{site}.backward" for site in columns] + [f"{site}.forward" for site in rows]
    return {*sums, *(gathers if sequence_parallel else [])}


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "no_sp"])
@pytest.mark.parametrize("model", [LLAMA, GPT | {"bias": True}], ids=["llama", "gpt"])
def test_every_collective_of_a_part_is_on_its_way_before_any_part_waits_for_its_own(model, sequence_parallel, parts):
    for events in run_ranks(2, order_of, config_of(model, sequence_parallel=sequence_parallel, parts=parts)):
        started = {event for event in events if event.endswith(("forward", "backward")) and not event.startswith("wait ")}
        assert started == sites_of(model, sequence_parallel=sequence_parallel)
        for site in started:
            calls, waits = at(events, site), at(events, f"wait {site}")
            assert len(calls) == len(waits) == parts, site
            assert calls[-1] < waits[0], f"{site}: {events}"


def test_a_recomputed_block_overlaps_in_both_of_its_forwards():
    for events in run_ranks(2, order_of, config_of(LLAMA, sequence_parallel=True, parts=2, recompute="full")):
        for site in ("attention.qkv.forward", "mlp.down.forward"):
            calls, waits = at(events, site), at(events, f"wait {site}")
            assert len(calls) == len(waits) == 4, site
            assert calls[1] < waits[0] < waits[1] < calls[2], f"{site}: {events}"
            assert calls[3] < waits[2], f"{site}: {events}"


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "no_sp"])
def test_a_columns_weight_gradient_runs_under_the_sum_of_its_dx(sequence_parallel):
    for events in run_ranks(2, order_of, config_of(LLAMA, sequence_parallel=sequence_parallel, parts=2)):
        for site in ("attention.qkv", "mlp.gate_up"):
            calls, waits = at(events, f"{site}.backward"), at(events, f"wait {site}.backward")
            grads = at(events, f"wgrad {site}")
            assert len(grads) == 2, site
            assert calls[-1] < grads[0] < waits[0] < grads[1] < waits[1], f"{site}: {events}"


def test_one_part_waits_at_once_but_for_the_sum_of_a_columns_dx():
    """So the spans tell the two apart: a blocking collective has none for its wait. Under the sum of dx runs the weight
    gradient, and no other call of the group."""
    config = make_config(LLAMA | ONE_BLOCK, mesh={"tp": 2}, overlap={"backend": "none"})
    columns = ("mlp.gate_up", "attention.qkv")
    for events in run_ranks(2, order_of, config):
        assert len(at(events, "mlp.down.forward")) == 1
        assert [event for event in events if event.startswith("wait")] == [f"wait {site}.backward" for site in columns]
        for site in columns:
            (call,) = at(events, f"{site}.backward")
            assert events[call : call + 3] == [f"{site}.backward", f"wgrad {site}", f"wait {site}.backward"]
