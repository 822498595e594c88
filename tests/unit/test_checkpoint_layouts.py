"""Saved under one layout, loaded under another: bit-equal, moments too, padding neither saved nor touched."""

import json
import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from megalite.checkpoint.load import Reader, load
from megalite.checkpoint.manifest import MANIFEST
from megalite.checkpoint.save import save
from megalite.parallel.spec import Part, Piece
from tests.unit.checkpoint_cases import (
    ALONE,
    KINDS,
    PADDING,
    SHAPES,
    D,
    H,
    blank,
    random_tensors,
    save_alone,
    shards,
)

LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 4), (2, 3), (4, 2)]


@pytest.mark.parametrize(("tp", "dp"), LAYOUTS)
def test_file_holds_the_logical_tensors(tmp_path, tp, dp):
    tensors = random_tensors(1)
    path = save_alone(tmp_path, 7, tensors, tp=tp, dp=dp)
    with Reader(path) as reader:
        reader.verify()
        for kind in KINDS:
            assert set(reader.manifest.tensors[kind]) == set(SHAPES)
            for name, want in tensors[kind].items():
                assert torch.equal(reader.tensor(kind, name), want), (kind, name)
    stored = sum(t.numel() for f in path.glob("*.safetensors") for t in load_file(f).values())
    assert stored == sum(torch.Size(s).numel() for s in SHAPES.values()) * len(KINDS)  # no padding, no replica


@pytest.mark.parametrize("saved", LAYOUTS)
@pytest.mark.parametrize("loaded", LAYOUTS)
def test_any_layout_loads_any(tmp_path, saved, loaded):
    tensors = random_tensors(2)
    path = save_alone(tmp_path, 7, tensors, tp=saved[0], dp=saved[1])
    wanted = shards(tensors, tp=loaded[0], dp=loaded[1])
    own = shards(tensors, tp=loaded[0], dp=loaded[1])
    for want, one in zip(wanted, own, strict=True):
        blank(one)
        assert load(path, one.state) == {"step": 7}
        for kind in KINDS:
            assert torch.equal(one.buffers[kind], want.buffers[kind])
            assert int((one.buffers[kind] == PADDING).sum()) == one.num_padding


def test_tp_chain_is_bit_equal(tmp_path):
    """C13: tp 1 -> 2 -> 4 -> 1 with fused and replicated parts, each time through load and save."""
    tensors = random_tensors(3)
    path = save_alone(tmp_path / "0", 1, tensors)
    for count, tp in enumerate((2, 4, 1), 1):
        ranks = shards(tensors, tp=tp, dp=1)
        for one in ranks:
            blank(one)
            load(path, one.state)
        state = {kind: [piece for one in ranks for piece in one.state[kind]] for kind in KINDS}
        path = save(tmp_path / str(count), 1, state, group=ALONE, owner=True, meta={})
    with Reader(path) as reader:
        for kind in KINDS:
            for name, want in tensors[kind].items():
                assert torch.equal(reader.tensor(kind, name), want)


def test_kv_replicas_all_receive_the_values(tmp_path):
    tensors = random_tensors(4)
    path = save_alone(tmp_path, 1, tensors, tp=1)
    replicas = []
    for one in shards(tensors, tp=4, dp=1):
        blank(one)
        load(path, one.state)
        key = next(piece for piece in one.state["main"] if piece.part.name == "layers.0.attention.k.weight")
        row = key.part.start[0]
        assert torch.equal(key.data.view(H, D), tensors["main"][key.part.name][row : row + H])
        replicas.append((row, key.part.replica))
    assert replicas == [(0, 0), (0, 1), (H, 0), (H, 1)]


@st.composite
def cut_tensors(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    cuts = st.lists(st.integers(0, torch.Size(shape).numel()), max_size=5)
    return shape, draw(cuts), draw(cuts)


def pieces_of(values: torch.Tensor, cuts: list[int]) -> list[Piece]:
    part = Part("x", tuple(values.shape), (0,) * values.dim(), tuple(values.shape))
    flat = values.reshape(-1)
    ends = sorted({0, flat.numel(), *cuts})
    return [Piece(part, a, flat[a:b]) for a, b in pairwise(ends)]


@given(cut_tensors(), st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=40, deadline=None)
def test_random_cuts(tmp_path_factory, case, dtype):
    shape, saved, loaded = case
    want = torch.randn(shape, dtype=dtype)
    root = tmp_path_factory.mktemp("cuts")
    path = save(root, 1, {"main": pieces_of(want, saved)}, group=ALONE, owner=True, meta={})
    out = torch.full(shape, float("nan"), dtype=dtype)
    load(path, {"main": pieces_of(out, loaded)})
    assert torch.equal(out, want)


def test_order_of_files_does_not_matter(tmp_path):
    """C12: the manifest decides, not the order in which a directory or a manifest lists things."""
    tensors = random_tensors(5)
    path = save_alone(tmp_path, 1, tensors, tp=4)
    with Reader(path) as reader:
        for trial in range(5):
            for entries in reader.manifest.tensors.values():
                for entry in entries.values():
                    random.Random(trial).shuffle(entry.stored)
            name = "layers.0.attention.q.weight"
            assert torch.equal(reader.tensor("exp_avg", name), tensors["exp_avg"][name])


def test_widening_is_exact_and_rounding_is_refused(tmp_path):
    narrow, wide = random_tensors(6), random_tensors(6, dtype=torch.float64)
    from32, from64 = save_alone(tmp_path / "a", 1, narrow), save_alone(tmp_path / "b", 1, wide)
    one = shards(wide, tp=1, dp=1)[0]
    load(from32, one.state)
    assert torch.equal(one.state["main"][0].data, narrow["main"]["embedding.word.weight"].double().reshape(-1))
    one = shards(narrow, tp=1, dp=1)[0]
    before = one.buffers["main"].clone()
    with pytest.raises(ValueError, match=r"float64, loading it as torch.float32 would round it"):
        load(from64, one.state)
    assert torch.equal(one.buffers["main"], before)
    load(from64, one.state, downcast=True)
    assert torch.equal(one.state["main"][0].data, wide["main"]["embedding.word.weight"].float().reshape(-1))


def test_weights_only(tmp_path):
    tensors = random_tensors(7, kinds=("main",))
    path = save_alone(tmp_path, 1, tensors, tp=2)
    one = shards(random_tensors(8), tp=1, dp=1)[0]
    moments = one.buffers["exp_avg"].clone()
    with pytest.raises(ValueError, match=r"has no exp_avg, only main; load with kinds=\('main',\)"):
        load(path, one.state)
    load(path, one.state, kinds=("main",))
    assert torch.equal(one.buffers["main"], shards(tensors, tp=1, dp=1)[0].buffers["main"])
    assert torch.equal(one.buffers["exp_avg"], moments)


def test_other_model_is_refused(tmp_path):
    """C05: a missing tensor, another shape, or tensors that no rank asked for, each by name and before any change."""
    tensors = random_tensors(9)
    path = save_alone(tmp_path, 1, tensors)
    values = torch.zeros(4)
    other = {"main": [Piece(Part("layers.1.mlp.up.weight", (4,), (0,), (4,)), 0, values)]}
    with pytest.raises(ValueError, match=r"has no main of layers\.1\.mlp\.up\.weight"):
        load(path, other)
    other = {"main": [Piece(Part("layers.0.mlp.up.weight", (2, 2), (0, 0), (2, 2)), 0, values)]}
    with pytest.raises(ValueError, match=r"shape \(12, 8\), the model's is \(2, 2\)"):
        load(path, other)
    assert not values.any()
    one = shards(tensors, tp=1, dp=1)[0]
    fewer = {kind: [p for p in pieces if "up" not in p.part.name] for kind, pieces in one.state.items()}
    load(path, fewer)  # part of a model, as a tool may read it
    with pytest.raises(ValueError, match=r"1 tensors that the model does not have, e\.g\. layers\.0\.mlp\.up"):
        load(path, fewer, group=ALONE)


def test_manifest_is_plain_json(tmp_path):
    path = save_alone(tmp_path, 123, random_tensors(10), tp=2)
    assert path.name == "step_00000123"
    plain = json.loads((path / MANIFEST).read_text())
    assert plain["step"] == 123
    assert plain["tensors"]["main"]["layers.0.mlp.down.weight"]["shape"] == [8, 12]
    assert set(plain["files"]) == {"rank_00000.safetensors"}
