"""The indexed format: files that megatron-core wrote are read and rewritten to the same bytes; damage is refused."""

import hashlib
import json
import multiprocessing
import struct
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest

from megalite.data.indexed import CODES, open_indexed
from megalite.data.writer import IndexedWriter, token_dtype
from tests.unit.data_tools import write_corpus

FIXTURES = Path(__file__).parents[1] / "fixtures" / "megatron_idx"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())["datasets"]
HELD = sorted(name for name in EXPECTED if (FIXTURES / f"{name}.idx").exists())
INTEGER = [name for name in HELD if not EXPECTED[name]["dtype"].startswith("float")]


def test_fixtures_are_held():
    assert len(HELD) == 10
    assert len(INTEGER) == 8


@pytest.mark.parametrize("name", INTEGER)
def test_reads_what_megatron_wrote(name):
    want, got = EXPECTED[name], open_indexed(str(FIXTURES / name))
    assert got.tokens.dtype.name == want["dtype"]
    assert got.sequence_lengths.tolist() == want["sequence_lengths"]
    assert [got.sequence(n).tolist() for n in range(want["sequence_count"])] == want["sequences"]
    bounds = want["document_indices"]
    documents = [list(chain(*want["sequences"][a:b])) for a, b in pairwise(bounds)]
    assert [got.document(n).tolist() for n in range(got.num_documents)] == documents
    assert got.num_documents == want["document_index_count"] - 1


@pytest.mark.parametrize("name", [n for n in INTEGER if not EXPECTED[n]["multimodal"]])
def test_writes_the_bytes_that_megatron_wrote(name, tmp_path):
    want = EXPECTED[name]
    bounds = want["document_indices"]
    with IndexedWriter(str(tmp_path / "x"), np.dtype(want["dtype"]), vocab_size=100000) as writer:
        for first, last in pairwise(bounds):
            writer.add_document(*want["sequences"][first:last])
        writer.finish()
    for kind in ("idx", "bin"):
        data = (tmp_path / f"x.{kind}").read_bytes()
        assert data == (FIXTURES / f"{name}.{kind}").read_bytes()
        assert hashlib.sha256(data).hexdigest() == want[f"{kind}_sha256"]


@pytest.mark.parametrize("name", ["dtype_f32", "dtype_f64"])
def test_float_tokens_are_refused(name):
    with pytest.raises(ValueError, match="dtype float.*must be integers"):
        open_indexed(str(FIXTURES / name))


def test_lengths_count_the_end_token(tmp_path):
    """D07: what the index says of a document includes its end-of-document token."""
    prefix = write_corpus(tmp_path / "x", [[1, 2, 3, 9], [4, 9], [9]])
    got = open_indexed(prefix)
    assert got.document_lengths.tolist() == [4, 2, 1]
    assert got.document_lengths.sum() * got.tokens.itemsize == (tmp_path / "x.bin").stat().st_size
    assert got.document(1).tolist() == [4, 9]


@pytest.mark.parametrize(
    ("vocab_size", "name"), [(65499, "uint16"), (65500, "int32"), (65536, "int32"), (70000, "int32")]
)
def test_largest_id_survives(tmp_path, vocab_size, name):
    """D12: ids never wrap at 16 bits."""
    got = open_indexed(write_corpus(tmp_path / "x", [[0, vocab_size - 1]], vocab_size=vocab_size))
    assert got.tokens.tolist() == [0, vocab_size - 1]
    assert got.tokens.dtype.name == token_dtype(vocab_size).name == name


@pytest.mark.parametrize("bad", [70000, -1, 2**33])
def test_ids_outside_the_vocabulary_are_refused(tmp_path, bad):
    with pytest.raises(ValueError, match=f"token id {bad} is outside the vocabulary of 70000"):
        write_corpus(tmp_path / "x", [[1, bad]], vocab_size=70000)
    assert list(tmp_path.iterdir()) == []


def _damage(idx: bytes, at: int, new: bytes) -> bytes:
    return idx[:at] + new + idx[at + len(new) :]


HEADER, NUM_SEQUENCES = 34, 3
DAMAGE = {
    "cut header": (lambda i: i[:20], "20 bytes, less than the 34"),
    "cut arrays": (lambda i: i[:-3], "truncated or damaged"),
    "too long": (lambda i: i + b"12345", "truncated or damaged"),
    "empty": (lambda i: b"", "0 bytes, less than the 34"),
    "magic": (lambda i: b"PK" + i[2:], "not a Megatron index"),
    "version": (lambda i: _damage(i, 9, struct.pack("<Q", 2)), "version 2"),
    "dtype": (lambda i: _damage(i, 17, b"\x63"), "unknown code 99"),
    "wide dtype": (lambda i: _damage(i, 17, bytes([CODES["int64"]])), "running sum"),
    "huge count": (lambda i: _damage(i, 18, struct.pack("<Q", 2**62)), "truncated or damaged"),
    "length": (lambda i: _damage(i, HEADER, struct.pack("<i", -1)), "sequence 0 has a negative length"),
    "offset": (lambda i: _damage(i, HEADER + 4 * NUM_SEQUENCES + 8, struct.pack("<q", 2)), "running sum"),
    "first document": (lambda i: _damage(i, HEADER + 12 * NUM_SEQUENCES, struct.pack("<q", 1)), "do not rise"),
    "last document": (lambda i: _damage(i, len(i) - 8, struct.pack("<q", 2)), "do not rise"),
    "document order": (lambda i: _damage(i, HEADER + 12 * NUM_SEQUENCES + 8, struct.pack("<q", 3)), "do not rise"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_index_is_refused(tmp_path, kind):
    damage, message = DAMAGE[kind]
    prefix = write_corpus(tmp_path / "x", [[1, 2], [3, 4, 5], [6]])
    idx = tmp_path / "x.idx"
    idx.write_bytes(damage(idx.read_bytes()))
    with pytest.raises(ValueError, match=message) as error:
        open_indexed(prefix)
    assert str(idx) in str(error.value)


@pytest.mark.parametrize("change", [lambda b: b[:-2], lambda b: b + b"\0\0"])
def test_tokens_of_another_size_are_refused(tmp_path, change):
    prefix = write_corpus(tmp_path / "x", [[1, 2], [3]])
    (tmp_path / "x.bin").write_bytes(change((tmp_path / "x.bin").read_bytes()))
    with pytest.raises(ValueError, match=r"x\.bin: . bytes, but x\.idx describes 3 tokens of 2 bytes = 6"):
        open_indexed(prefix)


def test_empty_and_missing_are_refused(tmp_path):
    prefix = write_corpus(tmp_path / "x", [[]])
    with pytest.raises(ValueError, match=r"x\.bin: the corpus is empty"):
        open_indexed(prefix)
    with pytest.raises(ValueError, match=r"y\.idx: no such file"):
        open_indexed(str(tmp_path / "y"))
    (tmp_path / "x.bin").unlink()
    with pytest.raises(ValueError, match=r"x\.bin: no such file"):
        open_indexed(prefix)


def test_failed_write_leaves_the_old_corpus(tmp_path):
    prefix = write_corpus(tmp_path / "x", [[1, 2]])
    writer = IndexedWriter(prefix, np.dtype("<u2"), vocab_size=10)
    with pytest.raises(RuntimeError), writer:  # noqa: PT012 - the failing block is the subject
        writer.add_document([3])
        raise RuntimeError
    assert open_indexed(prefix).tokens.tolist() == [1, 2]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.bin", "x.idx"]


def test_kill_between_renames_leaves_no_mixture(tmp_path, monkeypatch):
    """New tokens of the same size beside an old index would read as valid documents cut in wrong places."""
    prefix = write_corpus(tmp_path / "x", [[1, 2], [3]])

    def stop(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr("megalite.data.writer.write_atomic", stop)
    writer = IndexedWriter(prefix, np.dtype("<u2"), vocab_size=10)
    with pytest.raises(KeyboardInterrupt), writer:  # noqa: PT012
        writer.add_document([4])
        writer.add_document([5, 6])
        writer.finish({tmp_path / "x.json": b""})
    with pytest.raises(ValueError, match=r"x\.idx: no such file"):
        open_indexed(prefix)


def test_slower_process_leaves_the_faster_ones_corpus(tmp_path, monkeypatch):
    """D09: another process completes the same corpus right after this one found none; it may be read already."""
    idx, exists, unlink, removed = tmp_path / "x.idx", Path.exists, Path.unlink, []

    def exists_then_other_finishes(path):
        found = exists(path)
        if path == idx and not found:
            monkeypatch.setattr(Path, "exists", exists)
            write_corpus(tmp_path / "x", [[1, 2], [3]])
        return found

    def unlink_recorded(path, missing_ok=False):
        removed.append(path)
        unlink(path, missing_ok=missing_ok)

    with IndexedWriter(str(tmp_path / "x"), np.dtype("<u2"), vocab_size=1000) as writer:
        writer.add_document([1, 2])
        writer.add_document([3])
        monkeypatch.setattr(Path, "exists", exists_then_other_finishes)
        monkeypatch.setattr(Path, "unlink", unlink_recorded)
        writer.finish()
    assert removed  # temporary names only
    assert idx not in removed
    assert open_indexed(str(tmp_path / "x")).num_documents == 2


def _write_and_open(prefix, barrier):
    barrier.wait(30)
    write_corpus(Path(prefix), [[n % 7 + 1] * n for n in range(1, 40)], eod_id=0)
    assert open_indexed(prefix).num_tokens == 780  # while the others may still be writing


def test_processes_write_the_same_corpus_at_once(tmp_path):
    """D09: any number of ranks may build one corpus; nothing is read half-written, nothing is left behind."""
    context = multiprocessing.get_context("fork")
    for round_ in range(5):
        prefix, barrier = str(tmp_path / f"{round_}" / "x"), context.Barrier(4)
        ranks = [context.Process(target=_write_and_open, args=(prefix, barrier)) for _ in range(4)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(30)
        assert [rank.exitcode for rank in ranks] == [0] * 4
        assert sorted(p.name for p in Path(prefix).parent.iterdir()) == ["x.bin", "x.idx", "x.json"]
