"""ZeRO where it is deep: a bound on gathered bytes, HSDP with every stage, gradients sent in bf16, shards of nothing,
parameters that some microbatches leave alone, and the gradient check hook."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalite.checkpoint.load import load
from megalite.checkpoint.save import save
from megalite.config.load import check
from megalite.mesh import Sizes
from megalite.optim.norm import counted
from megalite.parallel.spec import ParamSpec, Part
from megalite.parallel.zero.hooks import StageHooks
from megalite.parallel.zero.manager import LinkUnits, ZeroManager, ZeroPolicy
from megalite.parallel.zero.unit import Place
from megalite.plan.live import least_live_bytes
from megalite.plan.units import check_frozen, logical_names
from megalite.train.logical import full_grads, full_params
from megalite.train.step import train_step
from tests import reference_gpt as oracle
from tests.dist.fault_tools import TOLERANCE, assert_same, make_trainer, settings_of
from tests.dist.layouts import GPT, INTERLEAVED, SGD, global_batch
from tests.dist.pool import RankError, mesh_for, run_ranks
from tests.dist.test_layouts import own_microbatches

HSDP = "mesh.dp.replicate=2 mesh.dp.shard=2"


def steps(rank: int, world: int, settings: dict[str, Any], num: int = 2) -> dict[str, Any]:
    """Train; whole tensors, the scalars of each step and the peak of live bytes."""
    trainer = make_trainer(settings)
    scalars = []
    for step in range(num):
        batches = own_microbatches(trainer.config, trainer.mesh.dp.rank, global_batch(settings, "uneven", step), step)
        done = train_step(trainer, batches, lr=trainer.config.lr.peak)
        scalars.append((done.loss, done.grad_norm))
    tensors = {"grads": full_grads(trainer), "params": full_params(trainer)}
    return {"scalars": scalars, "peak": trainer.zero.peak_live_bytes} | (tensors if rank == 0 else {})


def assert_trains_as(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    for ours, theirs in zip(actual["scalars"], expected["scalars"], strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCE)
    assert_same(actual["grads"], expected["grads"])
    assert_same(actual["params"], expected["params"])


# A bound on gathered bytes

STREAMED = f"mesh.dp=2 mesh.pp=2 {INTERLEAVED} zero.stage=3 zero.reshard_after=forward"


@pytest.mark.parametrize("tied", ["false", "true"])
def test_a_bound_is_kept_and_changes_no_number(tied):
    settings = settings_of(f"{STREAMED} model.tie_embeddings={tied}")
    bound, _ = least_live_bytes(check(settings, {}, name="bound"))
    free = run_ranks(4, steps, settings)
    tight = run_ranks(4, steps, settings | {"zero": settings["zero"] | {"max_live_bytes": bound}})
    assert max(result["peak"] for result in free) > bound, "the bound would change nothing"
    assert max(result["peak"] for result in tight) <= bound
    assert tight[0]["scalars"] == free[0]["scalars"]
    assert all(torch.equal(tight[0]["params"][name], value) for name, value in free[0]["params"].items())


def test_a_bound_that_cannot_be_kept_is_refused_by_every_rank():
    with pytest.raises(RankError) as error:
        run_ranks(4, steps, settings_of(f"{STREAMED} zero.max_live_bytes=1000"))
    assert sorted(error.value.ranks) == [0, 1, 2, 3]
    assert len(set(error.value.ranks.values())) == 1
    assert "zero.max_live_bytes=1000 is less than the " in error.value.ranks[0]


def walk_three_links(rank: int, world: int) -> list[tuple[str, str, str]]:
    """States of the three units inside and behind each link, forward and backward, when streaming."""
    names = ("first", "second", "third")
    zero, _ = make_units("stage 3", torch.float32, dict.fromkeys(names, (3, 40)))
    hooks = StageHooks(zero, 0, [LinkUnits((name,), (name,)) for name in names], streams=True)
    states = []

    def note() -> None:
        states.append(tuple(zero.units[name].state.value for name in names))

    for position in (0, 1, 2):
        hooks.before_forward(position)
        note()
        hooks.after_forward(position)
    for position in (2, 1, 0):
        hooks.before_backward(position, True)
        note()
        hooks.after_backward(position, True)
    note()
    return states


def test_the_next_link_is_on_its_way_while_a_link_runs():
    for states in run_ranks(4, walk_three_links):
        assert states == [
            ("gathered", "gathering", "sharded"),
            ("sharded", "gathered", "gathering"),
            ("sharded", "gathered", "gathered"),  # both stay where the chain turns
            ("sharded", "gathered", "gathered"),
            ("gathering", "gathered", "sharded"),
            ("gathered", "sharded", "sharded"),
            ("sharded", "sharded", "sharded"),
        ]


def wait_for_a_link(rank: int, world: int) -> list[tuple[str, str]]:
    """States of two units when the first is waited for, forward, and the second, backward."""
    zero, _ = make_units("stage 3", torch.float32, dict.fromkeys(("first", "second"), (3, 40)))
    first, second = zero.units.values()
    hooks = StageHooks(zero, 0, [LinkUnits((name,), (name,)) for name in zero.units], streams=True)
    states = []

    def noting(wait: Callable[[], None]) -> None:
        states.append((first.state.value, second.state.value))
        wait()

    for unit in (first, second):
        unit.finish_gather = partial(noting, unit.finish_gather)
    hooks.before_forward(0)
    forward = states[0]
    first.reshard(), second.reshard()
    states.clear()
    hooks.before_backward(1, True)
    return [forward, states[0]]


def test_the_next_gather_is_started_before_the_wait_for_a_link():
    assert run_ranks(4, wait_for_a_link) == [[("gathering", "gathering")] * 2] * 4


# HSDP, and shards of nothing

MATRIX = [
    "mesh.dp.replicate=4 mesh.dp.shard=1 zero.stage=0",
    f"{HSDP} zero.stage=1",
    f"{HSDP} zero.stage=2",
    f"{HSDP} zero.stage=2 zero.reduce_each=step",
    f"{HSDP} zero.stage=3 zero.reshard_after=forward",
    f"{HSDP} zero.stage=3 zero.reshard_after=step zero.reduce_each=step",
]


def test_hsdp_trains_as_one_device_at_every_stage():
    (expected,) = run_ranks(1, steps, settings_of(f"{SGD} model.num_layers=2"))
    for overrides in MATRIX:
        assert_trains_as(run_ranks(4, steps, settings_of(f"{overrides} {SGD} model.num_layers=2"))[0], expected)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_whose_vocabulary_is_all_padding(stage):
    """Five tokens on four ranks of two rows each: the last rank's embedding and head hold nothing."""
    few = f"model.vocab_size=5 model.num_layers=2 batch.micro_batch_size=2 {SGD}"
    (expected,) = run_ranks(1, steps, settings_of(few))
    actual = run_ranks(8, steps, settings_of(f"{few} mesh.tp=4 mesh.dp=2 zero.stage={stage}"))
    assert_trains_as(actual[0], expected)


# Units without a model: gradients are written by hand, as a backward would

SIZES = {"first": (3, 40), "second": (1, 0, 7)}
"""Elements of each unit's parameters; four shards of eight and more, so most of `second` is padding."""
LINKS = {name: LinkUnits((name,), (name,)) for name in SIZES}
LAYOUTS = {
    "stage 0": (0, False, Sizes(dp_replicate=4)),
    "stage 1": (1, False, Sizes(dp_shard=4)),
    "stage 2": (2, True, Sizes(dp_shard=4)),
    "stage 2, each step": (2, False, Sizes(dp_shard=4)),
    "stage 3": (3, True, Sizes(dp_shard=4)),
    "stage 3, each step": (3, False, Sizes(dp_shard=4)),
    "hsdp, stage 1": (1, False, Sizes(dp_replicate=2, dp_shard=2)),
    "hsdp, stage 3": (3, True, Sizes(dp_replicate=2, dp_shard=2)),
}


def make_units(
    layout: str, reduce: torch.dtype, numels_of: dict[str, tuple[int, ...]] | None = None
) -> tuple[ZeroManager, nn.Module]:
    stage, each_microbatch, sizes = LAYOUTS[layout]
    module, units = nn.Module(), {}
    for unit, numels in (numels_of or SIZES).items():
        units[unit] = []
        for numel in numels:
            name = f"{unit}_{numel}"
            param = nn.Parameter(torch.empty(numel, device="meta"))
            param.spec = ParamSpec((Part(name, (numel,), (0,), (numel,)),), "linear")
            units[unit].append((name, param, [Place(module, name)]))
    policy = ZeroPolicy(stage, each_microbatch, torch.float32, torch.float32, reduce)
    mesh = mesh_for(sizes)
    return ZeroManager(units, policy, mesh, lambda spec, shape: torch.zeros(shape)), module


def summed(rank: int, world: int, layout: str, reduce: torch.dtype, plan: list[dict[str, float]]) -> dict[str, Tensor]:
    """Gradients after microbatches that add (rank + 1) * plan[mb][unit] to each element; this rank's runs by name."""
    zero, module = make_units(layout, reduce)
    last = {unit: max(mb for mb, adds in enumerate(plan) if unit in adds) for unit in SIZES}
    zero.begin_step()
    for mb, adds in enumerate(plan):
        for unit, value in adds.items():
            zero.before(LINKS[unit], None, grads=True)
            for numel in SIZES[unit]:
                getattr(module, f"{unit}_{numel}").main_grad.add_((rank + 1) * value)
            zero.after(LINKS[unit], None)
        for unit in SIZES:  # a schedule reduces the stage, whatever the microbatch has touched
            if zero.policy.reduce_each_microbatch or (unit in adds and mb == last[unit]):
                zero.reduce(LINKS[unit])
    zero.finish_grads()
    return {
        f"{run.part.name} from {run.part_offset}": unit.grad[run.shard_offset : run.shard_offset + run.length].clone()
        for unit in zero.units.values()
        for run in zero.runs(unit)
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_microbatches_without_a_gradient(layout):
    """`second` is used by the middle microbatch only, `first` not by it."""
    plan = [{"first": 1.0}, {"second": 10.0}, {"first": 100.0}]
    results = run_ranks(4, summed, layout, torch.float32, plan)
    for result in results:
        for name, grad in result.items():
            assert torch.equal(grad, torch.full_like(grad, 10.0 * (101.0 if name.startswith("first") else 10.0))), name
    assert sum(grad.numel() for grad in results[0].values()) > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_sent_in_the_dtype_that_was_asked_for(layout):
    """1 + 2^-10 and its multiples by 2 and 4 are no bf16 numbers: sent as such they lose their last digit."""
    value = 1.0 + 2.0**-10
    exact, rounded = (
        run_ranks(4, summed, layout, dtype, [dict.fromkeys(SIZES, value)]) for dtype in (torch.float32, torch.bfloat16)
    )
    for wide, narrow in zip(exact, rounded, strict=True):
        for name, grad in wide.items():
            assert torch.equal(grad, torch.full_like(grad, 10 * value)), name
            assert torch.equal(narrow[name], torch.full_like(grad, 10.0)), name


# Frozen parameters

FROZEN = {
    "embedding.word.weight": "embedding.*",
    "layers.1.attention.k.weight": "*.1.attention.k.*",
    "layers.0.mlp_norm.weight": "layers.0.mlp_norm.weight",
}


def frozen_steps(rank: int, world: int, settings: dict[str, Any], root: Path) -> dict[str, Any]:
    """Two steps with nothing frozen, saved; two more from there with FROZEN."""
    trainer = make_trainer(settings)
    batches = own_microbatches(trainer.config, trainer.mesh.dp.rank, global_batch(settings, "uneven", 0), 0)
    for _ in range(2):
        train_step(trainer, batches, lr=0.1)
    save(root, 2, trainer.optimizer.pieces(counted), group=trainer.mesh.world, owner=trainer.zero.owns_replica, meta={})
    before = full_params(trainer)
    trainer = make_trainer(settings | {"model": settings["model"] | {"frozen": list(FROZEN.values())}})
    load(root / "step_00000002", trainer.optimizer.pieces(), group=trainer.mesh.world)
    trainer.optimizer.step_count = 2
    trainer.zero.updated()
    result = {"before": before, "loaded": full_params(trainer)}
    norms = [train_step(trainer, batches, lr=0.1).grad_norm for _ in range(2)]
    return result | {"after": full_params(trainer), "grads": full_grads(trainer), "norm": norms[-1]}


@pytest.mark.parametrize(
    "overrides",
    ["mesh.dp=2 zero.stage=3 recompute=full", "mesh.tp=2 mesh.pp=2", "mesh.tp=2 zero.stage=1 optimizer.name=adamw"],
)
def test_frozen_parameters_stand_still(tmp_path, overrides):
    """Whole tensors and a part of a fused one; neither decay nor moments from before they were frozen move them."""
    settings = settings_of(f"model.num_layers=2 {SGD if 'adamw' not in overrides else ''} {overrides}")
    world = check(settings, {}, name="frozen").world_size
    result = run_ranks(world, frozen_steps, settings, tmp_path)[0]
    for name, value in result["before"].items():
        assert torch.equal(result["loaded"][name], value), name
        assert torch.equal(result["after"][name], value) == (name in FROZEN), name
        assert bool((result["grads"][name] == 0).all()) == (name in FROZEN), name
    squares = sum(grad.square().sum() for grad in result["grads"].values())
    assert result["norm"] == pytest.approx(float(squares.sqrt()), rel=1e-12)


def test_a_pattern_that_matches_nothing_is_refused():
    config = check(settings_of("model.frozen=[layers.9.*,head.*,rope]"), {}, name="frozen")
    with pytest.raises(ValueError, match=r"^model.frozen=layers.9.\*, rope matches no tensor of this model; its names"):
        check_frozen(config)


@pytest.mark.parametrize("overrides", ["", GPT, "model.tie_embeddings=true mesh.pp=2 mesh.tp=2"])
def test_logical_names_are_the_oracles(overrides):
    settings = settings_of(overrides)
    names = logical_names(check(settings, {}, name="names"))
    assert sorted(names) == sorted(oracle.logical_shapes(oracle.resolve(**settings["model"])))


# The gradient check hook


def hooked(rank: int, world: int, settings: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """What the hook saw, the whole gradients, and how far the weights moved when the hook zeroed all gradients."""
    trainer = make_trainer(settings)
    seen: dict[str, list[Tensor]] = {}
    batch = global_batch(settings, "uneven", 0)
    batches = own_microbatches(trainer.config, trainer.mesh.dp.rank, batch, 0)
    trainer.zero.check_grads(lambda unit, name, grad: seen.setdefault(name, []).append(grad.clone()))
    train_step(trainer, batches, lr=0.1)
    grads, before = full_grads(trainer), full_params(trainer)
    trainer.zero.check_grads(lambda unit, name, grad: grad.zero_())
    assert train_step(trainer, batches, lr=0.1).grad_norm == 0.0
    after = full_params(trainer)
    moved = torch.stack([(after[name] - before[name]).abs().max() for name in before]).max()
    trainer.zero.check_grads(None)
    assert train_step(trainer, batches, lr=0.1).grad_norm > 0.0
    return {name: torch.cat(parts) for name, parts in seen.items()}, grads, moved


def test_the_hook_sees_every_gradient_whole_and_may_change_it():
    """On two shards that lie one after the other in each tensor, as without tp and fused tensors' parts."""
    settings = settings_of(f"mesh.dp=2 zero.stage=3 optimizer.weight_decay=0.0 {SGD} optimizer.momentum=0.0")
    results = run_ranks(2, hooked, settings)
    for name, whole in results[0][1].items():
        parts = [seen[name] for seen, _, _ in results if name in seen]
        assert torch.equal(torch.cat(parts), whole.flatten()), name
    assert {name for seen, _, _ in results for name in seen} == set(results[0][1])
    assert all(moved == 0.0 for _, _, moved in results)
