"""Every planted fault of tests/mutants.py is caught, by what it says catches it; without a fault nothing is found.

`-k mutants -s` or the end of the run shows the table of kills: the fault, what caught it, and the first complaint.
"""

from contextlib import nullcontext

import pytest

from megalite.config.load import check
from megalite.train.build import sizes_of
from megalite.verify.main import compare_with_device
from megalite.verify.report import failure
from megalite.verify.run import RankReport, run_rank
from megalite.verify.shrink import Shrunk, shrink
from tests.dist.layouts import BASE, LAYOUTS, with_overrides
from tests.dist.pool import mesh_for, run_ranks
from tests.dist.test_layouts import differences, oracle_run, run_layout
from tests.mutants import MUTANTS, VERIFY_LAYOUTS

OF_VERIFY = [name for name, mutant in MUTANTS.items() if mutant.caught_by == "verify"]
OF_ORACLE = [name for name, mutant in MUTANTS.items() if mutant.caught_by == "oracle"]


def planted(mutant: str | None):
    """The context of a fault, or of none."""
    return nullcontext() if mutant is None else MUTANTS[mutant].apply()


def shrunk(layout: str) -> Shrunk:
    """What verify makes of a layout."""
    return shrink(check(with_overrides(BASE, VERIFY_LAYOUTS[layout]), {}, name=layout), "fp64")


def verify_on_rank(rank: int, world: int, layout: str, mutant: str | None, poison: bool) -> RankReport:
    """In a rank: verify's run of a layout, with a fault planted."""
    config = shrunk(layout).layout
    with planted(mutant):
        return run_rank(config, mesh_for(sizes_of(config), kv_replicas=config.kv_replicas), poison=poison)


def device_on_rank(rank: int, world: int, layout: str) -> RankReport:
    """In the only rank of a pool: the one-device run."""
    config = shrunk(layout).device
    return run_rank(config, mesh_for(sizes_of(config)), poison=False)


def oracle_on_rank(rank: int, world: int, layout: str, mutant: str | None) -> dict:
    """In a rank: the run of test_layouts, with a fault planted."""
    with planted(mutant):
        return run_layout(rank, world, LAYOUTS[layout].settings, LAYOUTS[layout].masks)


@pytest.fixture(scope="module")
def devices() -> dict[str, RankReport]:
    """One-device reports, made once per layout."""
    return {}


@pytest.fixture(scope="module")
def kills(request) -> dict[str, tuple[str, str]]:
    """Mutant -> (what caught it, the first complaint); shown as a table at the end."""
    found: dict[str, tuple[str, str]] = {}
    yield found
    lines = [f"{name:<36} {by:<7} {text}" for name, (by, text) in found.items()]
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("\n" + "\n".join([f"mutants killed: {len(found)}", *lines]))


def complaints(layout: str, mutant: str | None, devices: dict[str, RankReport], *, poison: bool) -> str:
    """What verify says of a layout; nothing if all is well."""
    pair = shrunk(layout)
    if layout not in devices:
        devices[layout] = run_ranks(1, device_on_rank, layout)[0]
    reports = run_ranks(pair.layout.world_size, verify_on_rank, layout, mutant, poison)
    comparison = compare_with_device(pair, reports, devices[layout])
    text = failure("fp64", comparison, pair.layout, reports)
    assert comparison.equal == (text == "")
    return text


def test_there_are_enough_mutants_and_every_layout_has_one():
    assert len(MUTANTS) >= 16
    assert {MUTANTS[name].layout for name in OF_VERIFY} == set(VERIFY_LAYOUTS)
    assert all(mutant.expect for mutant in MUTANTS.values())


@pytest.mark.parametrize("layout", VERIFY_LAYOUTS)
def test_verify_finds_nothing_where_there_is_no_fault(layout, devices):
    assert complaints(layout, None, devices, poison=True) == ""


@pytest.mark.parametrize("name", OF_VERIFY)
def test_verify_catches(name, devices, kills):
    mutant = MUTANTS[name]
    text = complaints(mutant.layout, name, devices, poison=mutant.poison)
    assert text, f"{name} survived"
    kills[name] = ("verify", text.splitlines()[0])
    assert mutant.expect in text


@pytest.mark.parametrize("name", [None, *OF_ORACLE])
def test_the_oracle_catches(name, kills):
    layout = "one-rank" if name is None else MUTANTS[name].layout
    result = run_ranks(LAYOUTS[layout].world, oracle_on_rank, layout, name)[-1]
    found = differences(result, oracle_run(LAYOUTS[layout], result["initial"]), 1e-10)
    if name is None:
        assert found == []
        return
    assert found, f"{name} survived"
    kills[name] = ("oracle", found[0])
    assert MUTANTS[name].expect in found[0]
