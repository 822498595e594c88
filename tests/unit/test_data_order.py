"""Sample order and blends against Megatron's own index files, and the properties that training relies on."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megalite import native
from megalite.data.blend import Blend, blend_index, blend_index_python
from megalite.data.indexed import Indexed, open_indexed
from megalite.data.order import Stream, permutation, sample_index, sample_index_numpy, split_pieces
from tests.unit.data_tools import numbered, write_corpus

EXPECTED = json.loads((Path(__file__).parents[1] / "fixtures" / "megatron_idx" / "expected.json").read_text())
LENGTHS = {name: np.array(d["sequence_lengths"]) for name, d in EXPECTED["datasets"].items()}
MEGATRON = [n for n, case in EXPECTED["gpt_indices"].items() if not case["options"]]


@pytest.mark.parametrize("name", MEGATRON)
@pytest.mark.parametrize("build", [sample_index, sample_index_numpy])
def test_sample_index_is_megatrons(name, build):
    case = EXPECTED["gpt_indices"][name]
    got = build(LENGTHS[case["prefix"]], np.array(case["document_index"]), case["sequence_length"])
    assert got.tolist() == case["sample_index"]


@pytest.mark.parametrize("build", [sample_index, sample_index_numpy])
def test_no_overflow_past_two_billion_tokens(build):
    """D02."""
    got = build(np.full(4, 2**30, np.int64), np.arange(4), 2**20)
    assert len(got) - 1 == 4095
    assert got[-1].tolist() == [3, 1072693248]


def test_documents_longer_than_int32():
    got = sample_index(np.array([2**31, 2**31]), np.arange(2), 2**30)
    assert got.tolist() == [[0, 0], [0, 2**30], [1, 0], [1, 2**30]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 7), st.integers(0, 99))
def test_sample_index_equals_a_walk(lengths, seq_len, seed):
    """Native and numpy against the definition: token k * seq_len of the stream, found by counting."""
    order = np.random.default_rng(seed).permutation(len(lengths))
    places = [(position, offset) for position, d in enumerate(order) for offset in range(lengths[d])]
    assume(len(places) > seq_len)
    want = [places[k * seq_len] for k in range((len(places) - 1) // seq_len + 1)]
    for build in (sample_index, sample_index_numpy):
        assert [tuple(row) for row in build(np.array(lengths), order, seq_len).tolist()] == want


def test_native_functions_are_used_when_built(monkeypatch):
    """What is compared above is the compiled module wherever there is one."""
    calls = []

    class Module:
        def sample_index(self, *args):
            calls.append("sample")
            return sample_index_numpy(*args)

        def blend_index(self, *args):
            calls.append("blend")
            return blend_index_python(*args)

    monkeypatch.setattr(native, "load", Module)
    sample_index(np.array([5]), np.array([0]), 2)
    blend_index(np.array([0.5, 0.5]), 4)
    assert calls == ["sample", "blend"]


def _stream(tmp_path, count, seq_len, *, documents=1, shuffle=True, key=(1, 0, "train")):
    corpus = open_indexed(write_corpus(tmp_path / "x", numbered(count, documents=documents), vocab_size=10000))
    starts, lengths = split_pieces(corpus, (1, 0, 0), "train")
    return Stream(corpus, starts, lengths, seq_len, key=key, shuffle=shuffle)


@pytest.mark.parametrize(("count", "samples"), [(321, 10), (320, 9), (33, 1), (32, 0)])
def test_samples_of_an_epoch(tmp_path, count, samples):
    """D05: n + 1 boundaries make n samples; neighbours share one token; all inputs of an epoch are different tokens."""
    stream = _stream(tmp_path, count, 32, shuffle=False)
    assert stream.samples_per_epoch == samples
    rows = [stream.sample(i).tolist() for i in range(samples)]
    assert rows == [list(range(i * 32, i * 32 + 33)) for i in range(samples)]


def test_every_epoch_holds_all_samples_in_another_order(tmp_path):
    stream = _stream(tmp_path, 401, 8, documents=7)
    assert stream.samples_per_epoch == 50
    epochs = [[stream.sample(e * 50 + i) for i in range(50)] for e in range(3)]
    for rows in epochs:
        inputs = sorted(np.concatenate([row[:-1] for row in rows]).tolist())
        assert len(set(inputs)) == 400
    assert len({tuple(np.concatenate(rows).tolist()) for rows in epochs}) == 3
    joined = np.concatenate(epochs[0]).tolist()
    assert joined != sorted(joined)


def test_samples_do_not_depend_on_what_was_asked_before(tmp_path):
    stream, fresh = _stream(tmp_path, 401, 8, documents=7), _stream(tmp_path, 401, 8, documents=7)
    for index in [260, 3, 120, 3, 49, 50, 260]:
        assert stream.sample(index).tolist() == fresh.sample(index).tolist()
        fresh._epochs.clear()


def test_order_depends_on_every_part_of_the_key(tmp_path):
    keys = [(1, 0, "train"), (2, 0, "train"), (1, 1, "train"), (1, 0, "valid")]
    rows = {tuple(_stream(tmp_path, 401, 8, documents=7, key=k).sample(0).tolist()) for k in keys}
    assert len(rows) == 4


def test_one_document_is_shuffled_by_the_seed(tmp_path):
    first, other = (_stream(tmp_path, 401, 8, key=(seed, 0, "train")) for seed in (1, 2))
    assert [first.sample(i)[0] for i in range(50)] != [other.sample(i)[0] for i in range(50)]


def test_permutation_is_fixed_for_all_numpy_versions():
    """D13: the order is drawn from the Philox words, which numpy keeps; these numbers must never change."""
    assert permutation(10, 1, 0, "train", 0, "documents").tolist() == [3, 7, 9, 1, 8, 6, 2, 5, 0, 4]
    assert sorted(permutation(1000, 7).tolist()) == list(range(1000))


def _lengths_only(lengths: list[int]) -> Indexed:
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return Indexed("x", np.zeros(int(starts[-1]), np.uint16), np.array(lengths), starts)


def test_split_cuts_between_documents():
    corpus = _lengths_only([10] * 1000)
    sizes = [len(split_pieces(corpus, (969, 30, 1), part)[0]) for part in ("train", "valid", "test")]
    assert sizes == [969, 30, 1]
    starts, lengths = split_pieces(corpus, (969, 30, 1), "valid")
    assert starts[0] == 9690
    assert lengths.tolist() == [10] * 30


def test_split_rounds_to_the_nearest_document():
    """1003 documents: 0.969 of them is 971.9, 0.999 is 1001.997."""
    parts = [split_pieces(_lengths_only([10] * 1003), (969, 30, 1), part)[0] for part in ("train", "valid", "test")]
    assert [len(starts) for starts in parts] == [972, 30, 1]


def test_split_of_few_documents_cuts_inside_them():
    """One document, or so few that rounding would leave the test part empty: all three parts still exist."""
    for lengths in ([1000], [400, 600]):
        parts = [split_pieces(_lengths_only(lengths), (969, 30, 1), part) for part in ("train", "valid", "test")]
        assert [int(own.sum()) for _, own in parts] == [969, 30, 1]
        covered = [int(t) for starts, own in parts for s, n in zip(starts, own, strict=True) for t in range(s, s + n)]
        assert covered == list(range(1000))


def test_split_keeps_shares_of_zero_empty():
    parts = [split_pieces(_lengths_only([5] * 10), (90, 10, 0), part)[1].sum() for part in ("train", "valid", "test")]
    assert parts == [45, 5, 0]


@pytest.mark.parametrize("split", [(0, 0, 0), (1, -1, 1), (float("inf"), 1, 1), (float("nan"), 1, 1)])
def test_split_of_nonsense_is_refused(split):
    with pytest.raises(ValueError, match=r"data\.split="):
        split_pieces(_lengths_only([5]), split, "train")


@pytest.mark.parametrize("name", ["three_way", "skew"])
@pytest.mark.parametrize("build", [blend_index, blend_index_python])
def test_blend_is_megatrons(name, build):
    case = EXPECTED["blends"][name]
    which, sample = build(np.array(case["weights"]), case["size"])
    assert which.tolist() == case["dataset_index"]
    assert sample.tolist() == case["dataset_sample_index"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=6), st.integers(1, 300), st.integers(1, 300))
def test_blend_properties(weights, num, more):
    """D03: shares within one sample of the target; a longer run keeps the prefix; native and Python agree."""
    shares = np.array(weights) / sum(weights)
    which, sample = blend_index(shares, num)
    long_which, long_sample = blend_index(shares, num + more)
    assert long_which[:num].tolist() == which.tolist()
    assert long_sample[:num].tolist() == sample.tolist()
    other = blend_index_python(shares, num)
    assert (which.tolist(), sample.tolist()) == (other[0].tolist(), other[1].tolist())
    counts = np.bincount(which, minlength=len(shares))
    assert (counts < shares * num + 1 + 1e-9).all()
    for dataset, count in enumerate(counts):
        assert sample[which == dataset].tolist() == list(range(count))


@pytest.mark.parametrize("build", [blend_index, blend_index_python])
def test_blend_with_a_tiny_weight_builds(build):
    """D04: Megatron's rule draws it at k = 2, when the others have exactly their share; then not for 1e9 samples."""
    which, sample = build(np.array([0.5, 0.5, 1e-9]) / (1 + 1e-9), 1000)
    assert np.flatnonzero(which == 2).tolist() == [2]
    assert sample[which == 2].tolist() == [0]


def test_blend_grows_on_demand():
    grown, whole = Blend([3.0, 1.0]), Blend([3.0, 1.0])
    whole.reserve(5000)
    indices = [0, 7, 1023, 1024, 4999, 3]
    assert [grown[i] for i in indices] == [whole[i] for i in indices]
