"""The arithmetic of the mesh, without process groups."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.mesh import AXES, Sizes, check_world_size

sizes_strategy = st.builds(Sizes, *(st.integers(1, 4) for _ in range(4)))


@given(sizes_strategy)
def test_rank_and_coordinates_are_inverse(sizes: Sizes):
    ranks = [sizes.rank(**sizes.coordinates(rank)) for rank in range(sizes.world)]
    assert ranks == list(range(sizes.pp * sizes.dp_replicate * sizes.dp_shard * sizes.tp))


@given(sizes_strategy)
def test_groups_cover_every_rank_once(sizes: Sizes):
    for axes in AXES.values():
        groups = sizes.groups(axes)
        assert sorted(rank for group in groups for rank in group) == list(range(sizes.world))
        for group in groups:
            varying = [set(values) for values in zip(*(sizes.coordinates(r).items() for r in group), strict=True)]
            assert {key for values in varying if len(values) > 1 for key, _ in values} <= set(axes)
            assert list(group) == sorted(group)


def test_tp_is_fastest_then_shard_then_replicate_then_pp():
    sizes = Sizes(pp=2, dp_replicate=2, dp_shard=2, tp=2)
    assert sizes.groups(("tp",))[:2] == [(0, 1), (2, 3)]
    assert sizes.groups(("dp_shard",))[0] == (0, 2)
    assert sizes.groups(("dp_replicate",))[0] == (0, 4)
    assert sizes.groups(("dp_replicate", "dp_shard"))[1] == (1, 3, 5, 7)
    assert sizes.groups(("pp",))[3] == (3, 11)


def test_kv_groups_are_neighbours_and_tied_groups_join_the_ends():
    assert Sizes(tp=4, dp_shard=2).kv_groups(2) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert Sizes(pp=3, tp=2).tied_groups() == [(0, 4), (1, 5)]
    assert Sizes(tp=2).tied_groups() == [(0,), (1,)]


def test_a_wrong_number_of_ranks_is_refused_with_the_numbers_and_a_way_out():
    check_world_size(Sizes(pp=2, tp=2, dp_shard=2), 8)
    with pytest.raises(
        ValueError, match=r"pp 2 x dp 2 x tp 2 = 8 ranks, but the job has 12; .*mesh\.pp=2 mesh\.tp=2 mesh\.dp=3"
    ):
        check_world_size(Sizes(pp=2, tp=2, dp_shard=2), 12)
    with pytest.raises(ValueError, match=r"mesh\.pp=1 mesh\.tp=3 mesh\.dp=1"):
        check_world_size(Sizes(pp=2, tp=3), 3)
