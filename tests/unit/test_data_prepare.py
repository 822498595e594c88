"""From text to a corpus: what is written equals what was read, whatever the packing and the number of workers."""

import gzip
import hashlib
import json
from pathlib import Path

import pytest
import zstandard
from tokenizers import Tokenizer, models

from megalite.data.builtin import builtin_prefix
from megalite.data.indexed import open_indexed
from megalite.data.inspect import inspect
from megalite.data.loader import build_loader
from megalite.data.prepare import prepare
from megalite.data.sidecar import read_sidecar
from tests.unit.data_tools import data_config, write_corpus

TEXTS = ["To be, or not to be\n", "gr\u00fc\u00dfe \u4f60\u597d \U0001f600", "third <|endoftext|> document", "x" * 300]
EOD = 256


def _lines(texts, key="text"):
    return "".join(json.dumps({key: text, "id": n}) + "\n" for n, text in enumerate(texts)).encode()


def _documents(prefix):
    corpus = open_indexed(str(prefix))
    return [corpus.document(n).tolist() for n in range(corpus.num_documents)]


def _bytes(texts):
    return [[*text.encode(), EOD] for text in texts]


def _run(tmp_path, files, **options):
    output = str(tmp_path / "out" / "c")
    return prepare([str(f) for f in files], **{"tokenizer": "byte", "output": output, **options}), output


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(TEXTS[0])
    return path


def test_text_files_in_the_given_order(tmp_path):
    files = []
    for n, text in enumerate(TEXTS):
        files.append(tmp_path / f"{9 - n}.md")
        files[-1].write_text(text, encoding="utf-8")
    summary, output = _run(tmp_path, files)
    assert _documents(output) == _bytes(TEXTS)
    record = read_sidecar(output)
    digest = hashlib.sha256(b"".join(text.encode() + b"\0" for text in TEXTS)).hexdigest()
    assert (record.tokenizer, record.vocab_size, record.eod_id, record.text_sha256) == ("byte", 257, EOD, digest)
    assert (record.num_documents, record.num_tokens) == (4, sum(map(len, _bytes(TEXTS))))
    assert record == summary.sidecar
    assert "4 documents" in str(summary)


def test_lines_and_packed_files(tmp_path):
    data = _lines(TEXTS)
    pack = zstandard.ZstdCompressor().compress
    files = {
        "a.jsonl": data,
        "b.jsonl.gz": gzip.compress(data),
        "c.jsonl.zst": pack(data[:30]) + pack(data[30:]),
        "d.txt.zst": pack(TEXTS[1].encode() * 200000),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    _, output = _run(tmp_path, [tmp_path / name for name in files])
    assert _documents(output) == _bytes(TEXTS * 3 + [TEXTS[1] * 200000])


def test_folder_is_walked_in_order(tmp_path):
    for name in ("in/b/z.txt", "in/b/a.py", "in/a.rst", "in/skip.bin", "in/conf.json", "in/y.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(_lines([name]) if name.endswith("jsonl") else name.encode())
    summary, output = _run(tmp_path, [tmp_path / "in"])
    assert _documents(output) == _bytes(["in/a.rst", "in/b/a.py", "in/b/z.txt", "in/y.jsonl"])
    assert summary.counts.skipped_files == 2
    assert "2 other files" in str(summary)


@pytest.mark.parametrize("texts", [["", "a"], ["a", "", "b"], ["a", ""], ["", "", "a"]])
def test_empty_documents_are_left_out(tmp_path, texts):
    """D06."""
    (tmp_path / "a.jsonl").write_bytes(_lines(texts))
    summary, output = _run(tmp_path, [tmp_path / "a.jsonl"])
    assert _documents(output) == _bytes([t for t in texts if t])
    assert summary.counts.empty == texts.count("")


def test_only_empty_documents(tmp_path):
    """D06."""
    (tmp_path / "a.jsonl").write_bytes(_lines(["", ""]))
    with pytest.raises(ValueError, match=r"no text in 1 files \(2 empty documents\)"):
        _run(tmp_path, [tmp_path / "a.jsonl"])
    assert list((tmp_path / "out").iterdir()) == []


def test_bytes_that_are_not_utf8_are_replaced_and_counted(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    (tmp_path / "b.txt").write_text("real \ufffd", encoding="utf-8")
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "half \\ud83d"}\n{"text": "whole \\ud83d\\ude00"}\n')
    summary, output = _run(tmp_path, [tmp_path / n for n in ("a.txt", "b.txt", "c.jsonl")])
    assert _documents(output) == _bytes(["caf\ufffd", "real \ufffd", "half \ufffd", "whole \U0001f600"])
    assert summary.counts.replaced == 2


@pytest.mark.parametrize("tokenizer", ["byte", "train:400"])
def test_workers_do_not_change_the_result(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("megalite.data.prepare.BATCH_CHARS", 2000)
    (tmp_path / "a.jsonl").write_bytes(_lines([f"{n} {'word ' * (n % 37)}" for n in range(600)]))
    files = {}
    for workers in (1, 3):
        output = tmp_path / str(workers) / "c"
        prepare([str(tmp_path / "a.jsonl")], tokenizer=tokenizer, output=str(output), workers=workers)
        files[workers] = {path.name: path.read_bytes() for path in sorted(output.parent.iterdir())}
    assert files[1] == files[3]
    assert sorted(files[1])[:3] == ["c.bin", "c.idx", "c.json"]


@pytest.mark.parametrize("workers", [1, 2])
def test_error_in_a_later_line_leaves_nothing(tmp_path, workers):
    (tmp_path / "a.jsonl").write_bytes(_lines(TEXTS) + b'{"text": "x"\n')
    with pytest.raises(ValueError, match=r"a\.jsonl:5: not JSON"):
        _run(tmp_path, [tmp_path / "a.jsonl"], workers=workers)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            b'{"content": "x"}',
            r"a\.jsonl:2: no text under the key 'text' \(its keys are content\); name the key with --key",
        ),
        (b'{"text": 5}', r"a\.jsonl:2: no text under the key 'text'"),
        (b'["x"]', r"a\.jsonl:2: .*it is not an object"),
        (b"plain text", r"a\.jsonl:2: not JSON"),
    ],
)
def test_bad_lines(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_bytes(b"\n" + line + b"\n")
    with pytest.raises(ValueError, match=message):
        _run(tmp_path, [tmp_path / "a.jsonl"])


def test_key_of_lines(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(_lines(TEXTS, key="content"))
    _, output = _run(tmp_path, [tmp_path / "a.jsonl"], key="content")
    assert _documents(output) == _bytes(TEXTS)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.zst"])
def test_truncated_packed_file_is_refused(tmp_path, name):
    content = "".join(str(n * n) for n in range(50000)).encode()
    packed = gzip.compress(content) if name.endswith("gz") else zstandard.ZstdCompressor().compress(content)
    for cut in (len(packed) // 2, len(packed) - 1):
        (tmp_path / name).write_bytes(packed[:cut])
        with pytest.raises(ValueError, match=rf"{name}: cannot be read"):
            _run(tmp_path, [tmp_path / name])
    (tmp_path / name).write_bytes(b"not packed at all")
    with pytest.raises(ValueError, match=rf"{name}: cannot be read"):
        _run(tmp_path, [tmp_path / name])


def test_input_is_checked_before_anything_is_written(tmp_path, text_file):
    cases = [
        ({"files": [tmp_path / "no.txt", text_file]}, r"no such file: .*no\.txt"),
        ({"files": []}, "no input"),
        ({"tokenizer": "gpt2"}, "--tokenizer gpt2: no such file"),
        ({"tokenizer": "train:10"}, "at least 257"),
        ({"tokenizer": "train:many"}, "at least 257"),
        ({"tokenizer": str(text_file)}, r"not a tokenizer\.json"),
        ({"eod": "</s>"}, "leave --eod out"),
        ({"workers": 0}, "--workers 0"),
        ({"output": str(text_file / "c")}, "is not a folder"),
        ({"output": ""}, "give a prefix"),
    ]
    for change, message in cases:
        options = {"files": [text_file], **change}
        with pytest.raises(ValueError, match=message):
            _run(tmp_path, options.pop("files"), **options)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no file in this folder ends in"):
        _run(tmp_path, [tmp_path / "empty"])
    (tmp_path / "b.txt").write_bytes(b"PK\0\1")
    with pytest.raises(ValueError, match=r"b\.txt: holds NUL"):
        _run(tmp_path, [tmp_path / "b.txt"])
    assert not any((tmp_path / "out").glob("*"))


def test_inputs_and_strange_files_are_not_replaced(tmp_path):
    source = tmp_path / "c.json"
    source.write_bytes(_lines(TEXTS))
    with pytest.raises(ValueError, match="would replace the input"):
        prepare([str(source)], tokenizer="byte", output=str(tmp_path / "c"))
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match=r"would replace .*c\.json, which megalite did not write"):
        prepare([str(tmp_path / "a.txt")], tokenizer="byte", output=str(tmp_path / "c"))
    assert source.read_bytes() == _lines(TEXTS)


def test_an_older_corpus_is_replaced(tmp_path, text_file):
    _, output = _run(tmp_path, [text_file], tokenizer="train:300")
    (tmp_path / "b.txt").write_text("other")
    _, output = _run(tmp_path, [tmp_path / "b.txt"])
    assert _documents(output) == _bytes(["other"])
    assert sorted(p.name for p in Path(output).parent.iterdir()) == ["c.bin", "c.idx", "c.json"]


def test_trained_tokenizer(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(_lines([f"the cat sat on the mat {n}" for n in range(50)] + TEXTS))
    summary, output = _run(tmp_path, [tmp_path / "a.jsonl"], tokenizer="train:300")
    saved = Tokenizer.from_file(f"{output}.tokenizer.json")
    assert summary.sidecar.vocab_size == saved.get_vocab_size() == 300
    eod = saved.token_to_id("<|endoftext|>")
    documents = _documents(output)
    assert [d[-1] for d in documents] == [eod] * 54
    assert not any(eod in d[:-1] for d in documents)  # the text `<|endoftext|>` in a document is only text
    decoded = [saved.decode(d[:-1], skip_special_tokens=False) for d in documents]
    assert decoded[-4:] == TEXTS
    again, _ = _run(tmp_path, [tmp_path / "a.jsonl"], tokenizer=f"{output}.tokenizer.json", output=str(tmp_path / "d"))
    assert _documents(tmp_path / "d") == documents
    assert again.sidecar.tokenizer_sha256 == summary.sidecar.tokenizer_sha256
    assert "'the cat sat on the mat 0" in inspect(output)


def _word_tokenizer(folder, tokens):
    folder.mkdir()
    vocab = {token: n for n, token in enumerate(tokens)}
    Tokenizer(models.WordLevel(vocab, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    return folder


def test_tokenizer_without_end_token(tmp_path, text_file):
    """D08: refused before any write, naming the option; another token can be named, and must exist."""
    folder = _word_tokenizer(tmp_path / "tok", ["[UNK]", "stop", "hello"])
    with pytest.raises(ValueError, match="no end-of-document token .*--eod TOKEN"):
        _run(tmp_path, [text_file], tokenizer=str(folder))
    with pytest.raises(ValueError, match="--eod halt: .* has no such token"):
        _run(tmp_path, [text_file], tokenizer=str(folder), eod="halt")
    assert not (tmp_path / "out").exists()
    _, output = _run(tmp_path, [text_file], tokenizer=str(folder), eod="stop")
    assert _documents(output) == [[0, 1]]
    assert "end of document 1 (ends 1 documents)" in inspect(output)


def test_end_token_of_a_tokenizer_config(tmp_path, text_file):
    folder = _word_tokenizer(tmp_path / "tok", ["[UNK]", "</s>", "<end>"])
    summary, _ = _run(tmp_path, [text_file], tokenizer=str(folder))
    assert summary.sidecar.eod_id == 1
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    summary, _ = _run(tmp_path, [text_file], tokenizer=str(folder))
    assert summary.sidecar.eod_id == 2


def test_vocabulary_with_gaps_counts_to_its_largest_id(tmp_path, text_file):
    """D12: the vocabulary size comes from the largest id, which also chooses the stored type."""
    folder = tmp_path / "tok"
    folder.mkdir()
    Tokenizer(models.WordLevel({"[UNK]": 70000, "</s>": 1}, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    summary, output = _run(tmp_path, [text_file], tokenizer=str(folder))
    assert summary.sidecar.vocab_size == 70001
    assert _documents(output) == [[70000, 1]]


def test_inspect(tmp_path, text_file):
    _, output = _run(tmp_path, [text_file])
    text = inspect(output)
    assert inspect(f"{output}.idx") == text
    assert "uint16, 1 documents, 1 sequences, 21 tokens, 42 bytes" in text
    assert repr("To be, or not to be\n<eod>") in text
    foreign = inspect(write_corpus(tmp_path / "f", [[1, 2], [], [3]]))
    assert "min 0, 10% 0, median 1, 90% 2, max 2, mean 1.0; 1 empty" in foreign
    assert "not recorded" in foreign
    assert "first document: [1, 2]" in foreign


def test_inspect_refuses_another_tokenizer(tmp_path, text_file):
    _, output = _run(tmp_path, [text_file], tokenizer="train:300")
    Path(f"{output}.tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="not the tokenizer"):
        inspect(output)


def test_builtin_corpora(tmp_path):
    prefix = builtin_prefix("builtin:docs", cache_dir=str(tmp_path / "cache"))
    record, corpus = read_sidecar(prefix), open_indexed(prefix)
    assert (record.vocab_size, record.eod_id, record.tokenizer) == (257, EOD, "byte")
    assert corpus.num_documents > 50
    assert corpus.num_tokens == record.text_bytes + record.num_documents > 200_000
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").iterdir()}
    config = data_config("builtin:docs", seq_len=64, vocab_size=257)
    loader = build_loader(config, "train", dp_rank=0, dp_size=1, cache_dir=str(tmp_path / "cache"))
    assert loader.eod == EOD
    assert record.text_sha256[:16] in loader.describe()
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").iterdir()}
    with pytest.raises(ValueError, match="builtin:wiki: no such builtin corpus; use builtin:docs or builtin:stdlib"):
        builtin_prefix("builtin:wiki", cache_dir=str(tmp_path))


def test_builtin_library_has_no_tests(tmp_path, monkeypatch):
    root = tmp_path / "lib"
    for name in ("b.py", "a/x.py", "test/t.py", "a/tests/t.py", "site-packages/p.py", "empty.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("" if name == "empty.py" else name)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(root)})
    assert _documents(builtin_prefix("builtin:stdlib", cache_dir=str(tmp_path))) == _bytes(["a/x.py", "b.py"])
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path / "nothing")})
    with pytest.raises(ValueError, match="has no such texts on disk"):
        builtin_prefix("builtin:stdlib", cache_dir=str(tmp_path / "other"))
