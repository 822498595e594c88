"""Layout invariance: every layout of the table trains the same weights as one device.

Loss, gradient norm before clipping and every gathered gradient of each of three steps, and the weights after them,
equal the oracle (`tests/reference_gpt.py`), starting from megalite's own initial weights, which must be the same
bits in every layout. Layouts with dropout equal one rank of megalite, whose dropout is another test's business.
"""

from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from torch import Tensor

from megalite.batch import Microbatch
from megalite.config.load import check
from megalite.config.pipeline import equal_sizes, is_schedule_file
from megalite.config.recompute import WORDS
from megalite.config.schema import Config, Zero
from megalite.parallel.pp.schedules import BUILDERS
from megalite.train.build import build, sizes_of
from megalite.train.logical import full_grads, full_params
from megalite.train.step import train_step
from tests import reference_gpt as oracle
from tests.dist.layouts import LAYOUTS, NUM_STEPS, Layout, Masks, global_batch
from tests.dist.pool import mesh_for, run_ranks

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5}
FLOOR = 1e-3
"""A gradient far below the largest of all is compared on the scale of this times the largest: it may be zero but for
roundings, as that of k's bias is without rope."""


def run_layout(rank: int, world: int, settings: dict[str, Any], masks: Masks) -> dict[str, Any]:
    """Train NUM_STEPS steps; whole tensors come from the last rank only, scalars from all."""
    config = check(settings, {}, name="layout")
    mesh = mesh_for(sizes_of(config), config.kv_replicas, cpu_backend=config.comm.cpu_backend)
    trainer = build(config, mesh)
    for stage in trainer.stages:
        blocks = [name for link in stage.links for name in link.unit_names if name.startswith("layers.")]
        assert blocks == [f"layers.{index}" for index in range(*config.stage_layers[stage.index])]
    result: dict[str, Any] = {"initial": full_params(trainer), "scalars": [], "grads": []}
    for step in range(NUM_STEPS):
        batches = own_microbatches(config, trainer.mesh.dp.rank, global_batch(settings, masks, step), step)
        done = train_step(trainer, batches, lr=config.lr.peak)
        assert not done.skipped
        result["scalars"].append((done.loss, done.grad_norm, done.valid_tokens))
        result["grads"].append(full_grads(trainer))
    result["params"] = full_params(trainer)
    return result if rank == world - 1 else {"scalars": result["scalars"]}


def own_microbatches(config: Config, dp_rank: int, batch: dict[str, Tensor], step: int) -> list[Microbatch]:
    """This dp rank's share of a global batch."""
    size = config.batch.micro_batch_size
    first = dp_rank * config.batch.num_microbatches * size
    return [
        Microbatch(
            **{name: value[start : start + size] for name, value in batch.items()}, sample_start=start, step=step
        )
        for start in range(first, first + config.batch.num_microbatches * size, size)
    ]


def run(settings: dict[str, Any], world: int, masks: Masks) -> dict[str, Any]:
    """The last rank's results, after all ranks agreed on the scalars to the bit."""
    results = run_ranks(world, run_layout, settings, masks)
    for result in results:
        assert result["scalars"] == results[-1]["scalars"]
    return results[-1]


def oracle_run(layout: Layout, initial: dict[str, Tensor]) -> dict[str, Any]:
    """The same steps by the oracle, in float64; its gradients are those before clipping, as a trainer holds them."""
    settings = layout.settings
    batches = [global_batch(settings, layout.masks, step) for step in range(NUM_STEPS)]
    steps = oracle.train_steps(
        {name: value.double() for name, value in initial.items()},
        oracle.resolve(**settings["model"]),
        batches,
        optimizer=settings["optimizer"],
        lrs=[settings["lr"]["peak"]] * NUM_STEPS,
    )
    factors = [settings["optimizer"]["clip_norm"] / (step.grad_norm + 1e-6) for step in steps]
    assert max(factors) < 1, "the clip must act, else a wrong norm goes unseen"
    return {
        "scalars": [
            (step.loss, step.grad_norm, int((batch["labels"] != oracle.IGNORE).sum()))
            for step, batch in zip(steps, batches, strict=True)
        ],
        "grads": [step.grads for step in steps],
        "params": steps[-1].params,
    }


@pytest.fixture(scope="module")
def initial_weights() -> dict[str, dict[str, Tensor]]:
    """Initial weights of the one-rank run of each model, made once."""
    return {}


def differences(actual: dict[str, Any], expected: dict[str, Any], tolerance: float) -> list[str]:
    """What differs by more than `tolerance`, in the order in which it came about."""
    found = []
    for step, (ours, theirs) in enumerate(zip(actual["scalars"], expected["scalars"], strict=True)):
        for what, a, e in zip(("loss", "grad_norm", "tokens"), ours, theirs, strict=True):
            found += [] if abs(a - e) <= tolerance * abs(e) else [f"step {step} {what}: {a!r}, expected {e!r}"]
        grads = tensor_differences(actual["grads"][step], expected["grads"][step], tolerance)
        found += [f"step {step} gradient {text}" for text in grads]
    return found + tensor_differences(actual["params"], expected["params"], tolerance)


def tensor_differences(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> list[str]:
    """Tensors whose largest error, relative to their largest element, passes `tolerance`."""
    if set(actual) != set(expected):
        return [f"names: {sorted(set(actual) ^ set(expected))} are in one only"]
    floor = FLOOR * max(value.abs().max().item() for value in expected.values())
    errors = {
        name: ((actual[name].double() - value).abs().max() / value.abs().max().clamp(min=floor)).item()
        for name, value in expected.items()
    }
    return [f"{name}: relative error {error:.2e}" for name, error in errors.items() if not error <= tolerance]


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_trains_as_one_device(name: str, initial_weights: dict):
    layout = LAYOUTS[name]
    actual = run(layout.settings, layout.world, layout.masks)
    model = repr((sorted(layout.settings["model"].items()), layout.settings["precision"]))
    if layout.has_dropout:
        expected = run(layout.one_rank, 1, layout.masks)
        initial_weights[model] = expected["initial"]
        without = layout.one_rank | {"model": layout.one_rank["model"] | {"dropout": 0.0, "attention_dropout": 0.0}}
        undropped = run(without, 1, layout.masks)
        assert abs(expected["scalars"][0][0] - undropped["scalars"][0][0]) > 1e-6, "dropout did nothing"
    elif model not in initial_weights:
        initial_weights[model] = run(layout.one_rank, 1, layout.masks)["initial"]
    initial = initial_weights[model]
    assert set(initial) == set(oracle.logical_shapes(oracle.resolve(**layout.settings["model"])))
    for key, value in initial.items():
        assert torch.equal(actual["initial"][key], value), f"initial {key}"
    expected = expected if layout.has_dropout else oracle_run(layout, initial)
    found = differences(actual, expected, TOLERANCE[layout.settings["precision"]["compute"]])
    assert not found, "\n".join(found[:12])


def choices(annotation: Any) -> list[Any]:
    """The values of the Literals in a field's type."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for part in get_args(annotation) for value in choices(part)]


STAGES, RESHARDS, REDUCES, OFFLOADS = (
    choices(Zero.model_fields[name].annotation)
    for name in ("stage", "reshard_after", "reduce_each", "offload_optimizer")
)


def axes_of(layout: Layout, config: Config) -> set[str]:
    """What a layout stands for, but for its pipeline, ZeRO and recompute."""
    mesh, model = config.mesh, config.model
    seen = {f"tp{mesh.tp}", f"pp{mesh.pp}", f"dp{config.dp}", f"virtual{config.pipeline.virtual}"}
    seen |= {f"micro{config.batch.micro_batch_size}", layout.masks, model.family, config.optimizer.name}
    seen |= {f"tied-{model.tie_embeddings}-pp{mesh.pp}", f"{config.comm.cpu_backend} {layout.world}"}
    seen |= {"kv < tp"} if model.num_kv_heads < mesh.tp else set()
    seen |= {"no sp"} if mesh.tp > 1 and not mesh.sequence_parallel else set()
    seen |= {"vocab padded"} if model.vocab_size % mesh.tp else set()
    ways = {config.overlap.backend, *config.overlap.sites.values()} if mesh.tp > 1 else set()
    seen |= {f"overlap-{way}-sp-{config.sequence_parallel}" for way in ways}
    seen |= {"few"} if config.batch.num_microbatches < mesh.pp else set()
    return seen | ({"odd"} if config.batch.num_microbatches % mesh.pp else set())


def pipeline_of(config: Config) -> set[str]:
    """What a layout stands for in its pipeline, of more than one rank: schedule, costs, stages that are not equal."""
    pipeline, model = config.pipeline, config.model
    if config.mesh.pp == 1:
        return set()
    kind = "csv" if is_schedule_file(pipeline.schedule) else pipeline.schedule
    seen = {f"{kind} {'gathered' if is_gathered(config) else 'whole'}"}
    seen |= {"costs"} if pipeline.costs else set()
    if tuple(end - first for first, end in config.stage_layers) != equal_sizes(model.num_layers, config.num_stages):
        seen |= {"layers" if pipeline.layers else "layout auto" if pipeline.layout == "auto" else "layout text"}
    return seen


def state_of(config: Config) -> set[str]:
    """What a layout stands for in ZeRO, offload and recompute."""
    mesh, zero = config.mesh, config.zero
    pp = f"pp{min(mesh.pp, 2)}"
    seen = {f"zero{zero.stage}-tp{min(mesh.tp, 2)}-{pp}", f"zero{zero.stage}-{zero.reduce_each}"}
    seen |= {f"{zero.reshard_after}+{zero.reduce_each} {pp}"} if is_gathered(config) else set()
    seen |= {f"hsdp-zero{zero.stage}-{pp}"} if config.dp > config.dp_shard > 1 else set()
    recompute = config.recompute if isinstance(config.recompute, str) else "list"
    seen |= {f"offload {zero.offload_optimizer} {recompute}", f"offload {zero.offload_optimizer} zero{zero.stage}"}
    return seen | ({f"main {zero.offload_main} zero{zero.stage}"} if zero.offload_optimizer == "cpu" else set())


def is_gathered(config: Config) -> bool:
    """Whether ZeRO-3 has parameters to gather."""
    return config.zero.stage == 3 and config.dp_shard > 1


def wanted() -> set[str]:
    """What the table must hold. Schedules, ZeRO's choices and forms of recompute are those that the code has."""
    found = {f"{axis}{size}" for axis in ("tp", "pp", "dp", "virtual") for size in (1, 2, 4)}
    found |= {"micro1", "micro2", "uneven", "documents", "kv < tp", "no sp", "vocab padded", "few", "odd"}
    found |= {"gpt", "llama", "adamw", "sgd", "tied-True-pp1", "tied-True-pp2", "tied-True-pp4", "tied-False-pp2"}
    found |= {"zero0-tp1-pp1", "zero1-tp2-pp2", "zero2-tp2-pp2", "zero3-tp2-pp1", "zero3-tp1-pp2", "zero3-tp2-pp2"}
    found |= {"zero0-step", "zero1-step", "zero2-step", "zero2-microbatch", "zero3-step", "zero3-microbatch"}
    found |= {"gloo 2", "gloo 8", "auto 2", "auto 4", "auto 8"}
    found |= {f"overlap-{way}" for way in ("none-sp-True", "chunked-sp-True", "chunked-sp-False")}
    found |= {"overlap-symm-sp-True", "overlap-symm-sp-False"}
    found |= {f"{kind} {parameters}" for kind in BUILDERS for parameters in ("whole", "gathered")}
    found |= {"csv gathered", "costs", "layers", "layout text", "layout auto"}
    found |= {f"{reshard}+{reduce} pp2" for reshard in RESHARDS for reduce in REDUCES}
    found |= {"hsdp-zero1-pp1", "hsdp-zero2-pp1", "hsdp-zero3-pp1", "hsdp-zero2-pp2", "hsdp-zero3-pp2"}
    found |= {f"offload {where} {form}" for where in OFFLOADS for form in (*WORDS, "list")}
    found |= {f"offload {where} zero{stage}" for where in OFFLOADS for stage in STAGES}
    return found | {"main False zero3", "main True zero3"}


def test_the_table_covers_every_axis_alone_and_together():
    assert all((STAGES, RESHARDS, REDUCES, OFFLOADS)), "a type without a Literal"
    seen = set()
    for layout in LAYOUTS.values():
        config = check(layout.settings, {}, name="layout")
        seen |= axes_of(layout, config) | pipeline_of(config) | state_of(config)
    assert wanted() <= seen, wanted() - seen
