"""Checkpoints of four real ranks: one file each, one decision for all, and an error of one rank on every rank."""

import os
from pathlib import Path

import pytest
import torch

from megalite.checkpoint.exchange import exchange
from megalite.checkpoint.keep import latest, resolve
from megalite.checkpoint.load import Reader, load
from megalite.checkpoint.save import SaveError, save
from megalite.mesh import Sizes
from tests.dist.pool import mesh_for, run_ranks
from tests.unit.checkpoint_cases import KINDS, blank, random_tensors, save_alone, shard, shards

WORLD = 4


def own_shard(rank: int, tensors, *, tp: int, dp: int):
    return shard(tensors, tp=tp, dp=dp, tp_rank=rank % tp, dp_rank=rank // tp % dp)


def save_ranks(rank: int, world: int, root: Path, *, tp: int, dp: int, fault: str = "") -> str:
    """Save seed 1; ranks beyond tp * dp are replicas and write nothing. Returns the path or the error."""
    group = mesh_for(Sizes(dp_shard=world)).world
    state = own_shard(rank, random_tensors(1), tp=tp, dp=dp).state
    if fault == "nan" and rank == 2:
        state["main"][0].data[0] = float("nan")
    owner = rank < tp * dp and not (fault == "lost" and rank == 1)
    if fault == "no directory" and rank == 3:
        root = root / "elsewhere"
    try:
        return str(save(root, 7, state, group=group, owner=owner, meta={"by": rank}, keep_last=1))
    except SaveError as error:
        return f"error {error}"


def save_by_keywords(rank: int, world: int, root: Path, options: dict) -> str:
    return save_ranks(rank, world, root, **options)


def load_ranks(rank: int, world: int, path: Path, tp: int, dp: int, fault: str) -> tuple:
    group = mesh_for(Sizes(dp_shard=world)).world
    one, want = (own_shard(rank, random_tensors(1), tp=tp, dp=dp) for _ in range(2))
    blank(one)
    if fault and rank == 1:
        one.state["main"][0] = one.state["exp_avg"].pop()
    try:
        meta = load(path, one.state, group=group)
    except ValueError as error:
        return "error", str(error)
    return meta, all(torch.equal(one.buffers[kind], want.buffers[kind]) for kind in KINDS)


@pytest.mark.parametrize(("tp", "dp"), [(4, 1), (2, 2), (1, 4), (2, 1)])
def test_save_and_load_in_any_layout(tmp_path, tp, dp):
    paths = run_ranks(WORLD, save_by_keywords, tmp_path, {"tp": tp, "dp": dp})
    assert set(paths) == {str(tmp_path / "step_00000007")}
    with Reader(latest(tmp_path)) as reader:
        assert len(reader.manifest.files) == tp * dp
        for kind in KINDS:
            for name, want in random_tensors(1)[kind].items():
                assert torch.equal(reader.tensor(kind, name), want)
    for other in [(1, 1), (4, 1), (2, 2)]:
        assert run_ranks(WORLD, load_ranks, Path(paths[0]), *other, "") == [({"by": 0}, True)] * WORLD


@pytest.mark.parametrize(
    ("fault", "layout", "text"),
    [
        ("nan", (4, 1), "rank 2: SaveError: main of embedding.word.weight holds values that are not finite"),
        ("no directory", (4, 1), "rank 3: FileNotFoundError"),
        ("lost", (2, 2), "the state is not whole"),
    ],
)
def test_a_failing_rank_fails_all_and_spares_the_former(tmp_path, fault, layout, text):
    former = save_alone(tmp_path, 5, random_tensors(2))
    options = {"tp": layout[0], "dp": layout[1], "fault": fault}
    answers = run_ranks(WORLD, save_by_keywords, tmp_path, options)
    assert len(set(answers)) == 1
    assert text in answers[0]
    assert [path.name for path in tmp_path.iterdir()] == [former.name]
    assert latest(tmp_path) == former


def test_a_rank_that_can_not_load_stops_all(tmp_path):
    path = save_alone(tmp_path, 5, random_tensors(1))
    assert run_ranks(WORLD, load_ranks, path, 2, 2, "")[0] == ({"step": 5}, True)
    file = path / "rank_00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)  # hashed by rank 0 only
    answers = run_ranks(WORLD, load_ranks, path, 2, 2, "")
    assert len(set(answers)) == 1
    assert answers[0][0] == "error"
    assert answers[0][1].startswith("rank 0: ")
    assert "corrupted" in answers[0][1]


def resolve_blind(rank: int, world: int, root: Path) -> tuple[str, str]:
    """C11: rank 1 does not see the directory; rank 0's answer counts."""
    group = mesh_for(Sizes(dp_shard=world)).world
    seen = root if rank == 0 else root / "not mounted yet"
    try:
        resolve(str(seen / "wrong"), seen, group=group)
    except ValueError as error:
        return str(resolve("auto", seen, group=group)), str(error)
    return "", "no error"


def test_rank_0_decides_what_is_resumed(tmp_path):
    path = save_alone(tmp_path, 5, random_tensors(1))
    answers = run_ranks(WORLD, resolve_blind, tmp_path)
    assert {answer[0] for answer in answers} == {str(path)}
    assert len({answer[1] for answer in answers}) == 1
    assert f"{tmp_path}{os.sep}wrong is not a directory" in answers[0][1]


def exchange_odd(rank: int, world: int) -> list:
    group = mesh_for(Sizes(dp_shard=world)).world
    return exchange({"rank": rank, "text": "x" * 1000 * rank, "none": None}, group)


def test_exchange_of_unequal_values():
    want = [{"rank": rank, "text": "x" * 1000 * rank, "none": None} for rank in range(WORLD)]
    assert run_ranks(WORLD, exchange_odd) == [want] * WORLD


def test_reassembled_shards_are_the_cases_own_tensors():
    """The layout of the cases itself: every element of every logical tensor lies on some rank, once."""
    held = [piece for one in shards(random_tensors(1), tp=4, dp=1) for piece in one.state["main"]]
    total = sum(piece.data.numel() for piece in held if piece.part.replica == 0)
    assert total == sum(tensor.numel() for tensor in random_tensors(1)["main"].values())
