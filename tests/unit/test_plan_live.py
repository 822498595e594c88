"""The plan's account of gathered parameters: closed forms, what a bound does to it, and bounds that can't be kept."""

import pytest

from megalite.config.errors import ConfigError
from megalite.config.load import check
from megalite.config.schema import Config
from megalite.plan.live import Walk, check_live_bytes, least_live_bytes, peak_live_bytes
from megalite.plan.traffic import traffic
from megalite.plan.units import plan_rank
from tests.dist.layouts import BASE, INTERLEAVED, with_overrides

ZERO3 = "mesh.dp=2 zero.stage=3"
EMBEDDING = HEAD = 101 * 32
"""Elements; of the head without its norm. Both are multiples of 16, so that there is no padding."""
BLOCK = 2 * 32 + (32 + 2 * 16) * 32 + 32 * 32 + 3 * 48 * 32
FP64 = 8


def config_of(overrides: str) -> Config:
    return check(with_overrides(BASE, overrides), {}, name="plan")


def test_the_units_have_the_models_elements():
    plan = plan_rank(config_of(ZERO3))
    sizes = {name: plan.full_bytes(name) / FP64 for name in plan.layouts}
    assert sizes == {"embedding": EMBEDDING, **{f"layers.{i}": BLOCK for i in range(4)}, "head": HEAD + 32}


def test_streaming_holds_two_links_and_holding_all():
    everything = FP64 * (EMBEDDING + 4 * BLOCK + HEAD + 32)
    assert peak_live_bytes(config_of(ZERO3)) == everything
    assert peak_live_bytes(config_of(f"{ZERO3} zero.reshard_after=step")) == everything
    assert peak_live_bytes(config_of(f"{ZERO3} zero.reshard_after=forward")) == FP64 * 2 * BLOCK
    assert peak_live_bytes(config_of("mesh.dp=2 zero.stage=2")) == everything
    assert least_live_bytes(config_of(f"{ZERO3} zero.reshard_after=forward")) == (FP64 * BLOCK, 0)


def test_gathers_of_each_policy():
    """Streaming gathers each unit for F and B of each of 4 microbatches, but not the embedding for B, and it keeps the
    head and the last block from an F to the B right behind it; holding gathers once per microbatch in flight, or once.
    """
    for policy, gathers in {"forward": 4 * (2 * 6 - 3), "microbatch": 4 * 6, "step": 6}.items():
        config = config_of(f"{ZERO3} zero.reshard_after={policy}")
        assert sum(Walk(plan := plan_rank(config), None).run(plan.training).gathers.values()) == gathers


POLICIES = [
    f"{ZERO3} zero.reshard_after=forward",
    f"{ZERO3} mesh.pp=2 {INTERLEAVED} zero.reshard_after=forward",
    f"{ZERO3} mesh.pp=2 {INTERLEAVED} zero.reshard_after=microbatch",
    f"{ZERO3} mesh.pp=2 pipeline.schedule=zbv pipeline.virtual=2 zero.reshard_after=forward model.tie_embeddings=true",
    f"{ZERO3} mesh.pp=4 pipeline.schedule=zb_h1 zero.reshard_after=forward",
]


@pytest.mark.parametrize("overrides", POLICIES)
def test_any_bound_that_is_accepted_is_kept(overrides):
    """From the least one up, on every rank; a wider one gathers no more (it has room for links that stay where the
    chain turns), and a wide one changes nothing."""
    free = config_of(overrides)
    least, _ = least_live_bytes(free)
    before = None
    for bound in range(least, 4 * least, least // 7):
        config = config_of(f"{overrides} zero.max_live_bytes={bound}")
        check_live_bytes(config)
        ranks = range(0, config.world_size, config.dp)
        assert max(peak_live_bytes(config, rank=rank) for rank in ranks) <= bound
        gathers = sum(traffic(config, rank=rank)[entry].calls for rank in ranks for entry in _gathers(config, rank))
        assert before is None or gathers <= before, "putting a prefetch off costs no traffic"
        before = gathers
    assert peak_live_bytes(config_of(f"{overrides} zero.max_live_bytes={10**9}")) == peak_live_bytes(free)


def _gathers(config: Config, rank: int):
    return [entry for entry in traffic(config, rank=rank) if entry.site == "zero.gather"]


def test_a_bound_below_one_link_is_refused():
    with pytest.raises(ValueError, match="^zero.max_live_bytes=") as error:
        check_live_bytes(config_of(f"{ZERO3} zero.reshard_after=forward zero.max_live_bytes=1000"))
    assert str(error.value) == (
        f"zero.max_live_bytes=1000 is less than the {FP64 * BLOCK} bytes that one link of the model needs on pp rank "
        f"0; use zero.max_live_bytes={FP64 * BLOCK} or more"
    )


def test_a_bound_below_what_a_policy_holds_is_refused():
    most, link = FP64 * (EMBEDDING + 4 * BLOCK + HEAD + 32), FP64 * BLOCK
    for bound, more in ((most - 1, ""), (link - 1, f" with {link} or more")):
        with pytest.raises(ValueError, match="^zero.max_live_bytes=") as error:
            check_live_bytes(config_of(f"{ZERO3} zero.max_live_bytes={bound}"))
        assert str(error.value) == (
            f"zero.max_live_bytes={bound} is less than the {most} bytes that zero.reshard_after=microbatch holds at "
            f"once on pp rank 0; use zero.max_live_bytes={most} or more, or zero.reshard_after=forward{more}"
        )


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ("mesh.dp=2 zero.stage=2", "with zero.stage=2: parameters stay whole"),
        ("zero.stage=3", "with one shard (mesh.dp=1 or mesh.dp.shard=1): parameters stay whole"),
    ],
)
def test_a_bound_on_nothing_is_refused(overrides, why):
    with pytest.raises(ConfigError) as error:
        config_of(f"{overrides} zero.max_live_bytes=1000")
    assert error.value.problems == [f"zero.max_live_bytes=1000 has no effect {why}; leave it out (default null)"]
