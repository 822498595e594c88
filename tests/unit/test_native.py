"""The compiled helpers against plain Python, published vectors and hand-made cases; and what happens without them."""

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megalite import native

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def ext():
    """The extension; a machine without a compiler has none, which the test of the build info checks."""
    module = native.load()
    if module is None:
        pytest.skip(f"not built: {native.why_missing()}")
    return module


def sample_index_python(lengths, order, seq_len):
    """The definition: token t of the stream lies in the document whose range holds it."""
    starts = [(position, offset) for position, doc in enumerate(order) for offset in range(lengths[doc])]
    samples = (len(starts) - 1) // seq_len
    return [starts[i * seq_len] for i in range(samples + 1)]


@pytest.mark.parametrize("seq_len", [1, 2, 7, 30])
def test_sample_index_equals_its_definition(ext, seq_len):
    rng = np.random.default_rng(seq_len)
    lengths = rng.integers(0, 9, size=40).astype(np.int32)  # empty documents too
    order = rng.permutation(40).astype(np.int64)
    assert ext.sample_index(lengths, order, seq_len).tolist() == [
        list(row) for row in sample_index_python(lengths.tolist(), order.tolist(), seq_len)
    ]


def test_sample_index_beyond_int32(ext):
    index = ext.sample_index(np.full(4, 2**30, np.int32), np.arange(4), 2**20)
    assert index.shape == (4096, 2)  # 4095 samples
    assert index.dtype == np.int64
    assert index[-1].tolist() == [3, 1072693248]


def test_sample_index_last_token_is_only_a_label(ext):
    assert ext.sample_index(np.array([5], np.int32), np.array([0]), 4).tolist() == [[0, 0], [0, 4]]
    with pytest.raises(ValueError, match="fewer tokens"):
        ext.sample_index(np.array([4], np.int32), np.array([0]), 4)


@pytest.mark.parametrize(
    ("lengths", "order", "seq_len", "match"),
    [
        ([3, 3], [0, 2], 2, "does not exist"),
        ([3, 3], [0, -1], 2, "does not exist"),
        ([3, -3], [0, 1], 2, "negative length"),
        ([3, 3], [0, 1], 0, "seq_len"),
        ([[3, 3]], [0, 1], 1, "lengths must have one dim"),
    ],
)
def test_sample_index_refuses(ext, lengths, order, seq_len, match):
    with pytest.raises(ValueError, match=match):
        ext.sample_index(np.array(lengths, np.int32), np.array(order), seq_len)


def blend_python(weights, num):
    """The greedy rule, literally."""
    count, rows = [0] * len(weights), []
    for k in range(num):
        lag = [w * max(k, 1) - c for w, c in zip(weights, count, strict=True)]
        best = lag.index(max(lag))
        rows.append((best, count[best]))
        count[best] += 1
    return rows


@pytest.mark.parametrize("weights", [[1.0], [0.5, 0.5], [0.7, 0.2, 0.1], [1 / 3, 1 / 3, 1 / 3]])
def test_blend_index_equals_its_rule(ext, weights):
    dataset, sample = ext.blend_index(np.array(weights), 200)
    assert (dataset.dtype, sample.dtype) == (np.int16, np.int64)
    assert list(zip(dataset.tolist(), sample.tolist(), strict=True)) == blend_python(weights, 200)


def test_blend_index_by_hand(ext):
    dataset, sample = ext.blend_index(np.array([0.5, 0.3, 0.2]), 6)
    assert dataset.tolist() == [0, 1, 2, 0, 1, 0]
    assert sample.tolist() == [0, 0, 0, 1, 1, 2]
    with pytest.raises(ValueError, match="out of range"):
        ext.blend_index(np.array([]), 3)
    with pytest.raises(ValueError, match="num"):
        ext.blend_index(np.array([1.0]), -1)


def test_philox_known_answers(ext):
    """Words 0 and 1 of Random123's kat_vectors for philox4x32 10."""
    ones, counter, stream = 0xFFFFFFFF, 0x85A308D3243F6A88, 0x0370734413198A2E
    cases = [
        ((0, 0, 0, 1, 0), (0x6627E8D5, 0xE169C58D)),
        ((ones, ones, 2**64 - 1, 1, 2**64 - 1), (0x408F276D, 0x41C83B0E)),
        ((0xA4093822, 0x299F31D0, counter, 1, stream), (0xD16CFE09, 0x94FDCCEB)),
    ]
    for arguments, want in cases:
        assert tuple(int(word[0]) for word in ext.philox_words(*arguments)) == want


def test_philox_any_run_of_counters_is_a_slice(ext):
    start = 2**32 - 5  # the run carries into the high word
    whole = ext.philox_words(7, 9, start, 12)
    part = ext.philox_words(7, 9, start + 3, 4)
    for a, b in zip(whole, part, strict=True):
        assert a.dtype == np.uint32
        assert (a[3:7] == b).all()
    assert len(set(whole[0].tolist())) == 12


def test_the_build_info_tells_what_load_finds():
    info = native.build_info()
    assert set(info) == {"built", "cuda", "compiler", "nvcc", "error"}
    assert (native.load() is not None) == info["built"]
    assert (native.why_missing() is None) == info["built"]


def test_without_the_extension_load_is_none_and_says_why(monkeypatch, tmp_path):
    def missing(name):
        raise ImportError(f"no module {name}")

    monkeypatch.setattr(importlib, "import_module", missing)
    monkeypatch.setattr(native, "BUILD_INFO", tmp_path / "info.json")
    native._import.cache_clear()
    try:
        assert native.load() is None
        assert "never built" in native.why_missing()
        native.BUILD_INFO.write_text(json.dumps({"error": "compiler on fire"}))
        assert "compiler on fire" in native.why_missing()
    finally:
        native._import.cache_clear()


def test_a_broken_compiler_does_not_block_the_build(tmp_path):
    """The build ends with status 0, no extension, and the compiler's words in the record."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "csrc", tree / "csrc")
    (tree / "megalite").mkdir()
    (tree / "megalite" / "__init__.py").touch()
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(
        command,
        cwd=tree,
        env={"PATH": "/usr/bin:/bin", "CXX": "/bin/false"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    info = json.loads((tree / "megalite" / "_build_info.json").read_text())
    assert not info["built"]
    assert "/bin/false" in info["error"]
    assert not list((tree / "megalite").glob("_C*"))
    assert "NOT built" in done.stderr
