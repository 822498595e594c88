"""The loader: which tokens a step sees, whatever the layout, the length of the run and the restarts."""

import numpy as np
import pytest
import torch

from megalite.batch import IGNORE
from megalite.data.loader import build_loader
from tests.unit.data_tools import data_config, numbered, write_corpus


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "x", numbered(2049, documents=11), vocab_size=5000)


def _loader(config, split="train", rank=0, size=1):
    return build_loader(config, split, dp_rank=rank, dp_size=size)


def _global_batch(config, step, size=1):
    """(G, S) tokens and labels in the order of sample_start, joined from all data parallel ranks."""
    parts = [mb for rank in range(size) for mb in _loader(config, rank=rank, size=size).microbatches(step)]
    parts.sort(key=lambda mb: mb.sample_start)
    return torch.cat([mb.tokens for mb in parts]), torch.cat([mb.labels for mb in parts])


def test_microbatch_types_and_labels(corpus):
    (mb, *_) = _loader(data_config(corpus, seq_len=16, batch=(4, 2))).microbatches(3)
    assert (mb.tokens.shape, mb.tokens.dtype, mb.labels.dtype) == ((2, 16), torch.int64, torch.int64)
    assert torch.equal(mb.tokens[:, 1:], mb.labels[:, :-1])
    assert (mb.documents, mb.step, mb.sample_start) == (None, 3, 0)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 2])
def test_layout_does_not_change_the_batch(corpus, size, micro):
    want = _global_batch(data_config(corpus, seq_len=16, batch=(8, 8)), 5)
    got = _global_batch(data_config(corpus, seq_len=16, batch=(8, micro)), 5, size)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_rank_takes_its_contiguous_block(corpus):
    config = data_config(corpus, seq_len=16, batch=(8, 2))
    starts = [[mb.sample_start for mb in _loader(config, rank=r, size=2).microbatches(1)] for r in range(2)]
    assert starts == [[0, 2], [4, 6]]


def test_every_token_is_seen_once_per_epoch(corpus):
    """M04, D11: 128 samples of 16 tokens: 16 steps of 8 see all of them, and so do the next 16, in another order."""
    loader = _loader(data_config(corpus, seq_len=16, batch=(8, 4), split=(1, 0, 0)))
    assert loader.samples_per_epoch == 128
    epochs = []
    for epoch in range(2):
        steps = range(16 * epoch + 1, 16 * epoch + 17)
        epochs.append(torch.cat([mb.tokens.flatten() for s in steps for mb in loader.microbatches(s)]))
        assert len(set(epochs[-1].tolist())) == 16 * 8 * 16 == epochs[-1].numel()
    assert not torch.equal(*epochs)


@pytest.mark.parametrize("split", ["train", "valid"])
def test_resume_needs_the_step_only(corpus, split):
    """C17, D11: with accumulation 4, a loader that begins at step 4 sees what an unbroken run sees, over epochs."""
    config = data_config(corpus, seq_len=16, batch=(8, 2), split=(50, 50, 0))
    unbroken = _loader(config, split)
    rows = [[mb.tokens for mb in unbroken.microbatches(step)] for step in range(1, 30)]
    resumed = _loader(config, split)
    for step in range(4, 30):
        for want, got in zip(rows[step - 1], resumed.microbatches(step), strict=True):
            assert torch.equal(want, got.tokens)


def test_longer_run_keeps_the_prefix(corpus, tmp_path):
    other = write_corpus(tmp_path / "y", numbered(900, documents=5, first=3000), vocab_size=5000)
    short, long = (
        _loader(data_config(corpus, other, seq_len=16, steps=steps, weights=[0.7, 0.3])) for steps in (3, 4000)
    )
    for step in (1, 2, 3, 200):  # 200 is behind the end of the short run
        for a, b in zip(short.microbatches(step), long.microbatches(step), strict=True):
            assert torch.equal(a.tokens, b.tokens)


def test_blend_takes_each_corpus_by_its_share(corpus, tmp_path):
    """D03: draws past one corpus' epoch go on in its next epoch; shares stay within one sample."""
    other = write_corpus(tmp_path / "y", numbered(2049, first=2500), vocab_size=5000)
    options = {"weights": [0.001, 0.999], "split": (1, 0, 0), "steps": 1}
    loader = _loader(data_config(corpus, other, seq_len=16, batch=(192, 192), **options))
    (mb,) = loader.microbatches(1)
    from_other = int((mb.tokens[:, 0] >= 2500).sum())
    assert abs(from_other - 0.999 * 192) <= 1
    inputs = mb.tokens[mb.tokens[:, 0] >= 2500]
    assert len(set(inputs[:128].flatten().tolist())) == 2048
    assert loader.samples_per_epoch == int(128 / 0.999)


def test_validation_is_fixed_and_in_order(corpus):
    config = data_config(corpus, seq_len=16, split=(90, 10, 0), batch=(4, 4))
    loader = _loader(config, "valid")
    first, again = loader.microbatches(1)[0], loader.microbatches(1)[0]
    assert torch.equal(first.tokens, again.tokens)
    flat = first.tokens.flatten().tolist()
    assert flat == list(range(flat[0], flat[0] + 64))
    wrapped = loader.microbatches(1 + loader.samples_per_epoch)[0]  # 4 epochs on: the same order again
    assert torch.equal(wrapped.tokens, first.tokens)


def test_splits_share_no_token(corpus):
    seen = []
    for split in ("train", "valid", "test"):
        loader = _loader(data_config(corpus, seq_len=16, split=(60, 20, 20), batch=(1, 1)), split)
        rows = [mb.tokens for s in range(loader.samples_per_epoch) for mb in loader.microbatches(s + 1)]
        seen.append(set(torch.cat(rows).flatten().tolist()))
    assert all(seen)
    assert len(seen[0] | seen[1] | seen[2]) == sum(map(len, seen))


def test_document_mask_and_end_of_document_loss(tmp_path):
    corpus = write_corpus(tmp_path / "x", [[5, 6, 0], [7, 0], [8, 9, 10, 11, 0]], vocab_size=20, eod_id=0)
    options = {"document_mask": True, "mask_eod_loss": True, "split": (0, 1, 0)}
    (mb,) = _loader(data_config(corpus, seq_len=8, batch=(1, 1), **options), "valid").microbatches(1)
    assert mb.tokens.tolist() == [[5, 6, 0, 7, 0, 8, 9, 10]]
    assert mb.documents.tolist() == [[0, 0, 0, 1, 1, 2, 2, 2]]
    assert mb.documents.dtype == torch.int32
    assert mb.labels.tolist() == [[6, 0, IGNORE, 0, IGNORE, 9, 10, 11]]
    plain = data_config(corpus, seq_len=8, batch=(1, 1), split=(0, 1, 0))
    (mb,) = _loader(plain, "valid").microbatches(1)
    assert mb.labels.tolist() == [[6, 0, 7, 0, 8, 9, 10, 11]]
    assert mb.documents is None


def test_end_of_document_id_of_a_foreign_corpus(tmp_path):
    corpus = write_corpus(tmp_path / "x", [[5, 6, 3], [7, 8]], vocab_size=20)
    with pytest.raises(ValueError, match=r"data\.mask_eod_loss=true needs the end-of-document id.*set data\.eod_id"):
        _loader(data_config(corpus, seq_len=4, split=(0, 1, 0), mask_eod_loss=True), "valid")
    config = data_config(corpus, seq_len=4, split=(0, 1, 0), mask_eod_loss=True, eod_id=3, batch=(1, 1))
    assert _loader(config, "valid").microbatches(1)[0].labels.tolist() == [[6, 3, IGNORE, 8]]
    with pytest.raises(ValueError, match=r"data\.eod_id=50 is not below model\.vocab_size=20"):
        _loader(data_config(corpus, seq_len=4, split=(1, 0, 0), eod_id=50, vocab_size=20))


def test_corpora_that_disagree_are_refused(tmp_path):
    a = write_corpus(tmp_path / "a", numbered(50), vocab_size=100, eod_id=1)
    b = write_corpus(tmp_path / "b", numbered(50), vocab_size=100, eod_id=2)
    with pytest.raises(ValueError, match=r"the corpora record \[1, 2\]; set data\.eod_id"):
        _loader(data_config(a, b, seq_len=4, split=(1, 0, 0), document_mask=True))
    text = (tmp_path / "b.json").read_text().replace('"tokenizer": "test"', '"tokenizer": "other"')
    (tmp_path / "b.json").write_text(text)
    with pytest.raises(ValueError, match=r"blends .*a \(tokenizer test\) with .*b \(tokenizer other\)"):
        _loader(data_config(a, b, seq_len=4, split=(1, 0, 0)))


def test_vocabulary_of_the_corpus_must_fit(tmp_path):
    foreign = write_corpus(tmp_path / "f", [[1, 299, 2]], vocab_size=1000)
    with pytest.raises(ValueError, match=r"model\.vocab_size=299 is less than the 300 of .*largest token id 299"):
        _loader(data_config(foreign, seq_len=2, split=(1, 0, 0), vocab_size=299))
    assert _loader(data_config(foreign, seq_len=2, split=(1, 0, 0), vocab_size=300)).microbatches(1)
    ours = write_corpus(tmp_path / "o", [[1, 2, 3]], vocab_size=1000, eod_id=0)
    with pytest.raises(ValueError, match=r"model\.vocab_size=300 is less than the 1000 of .*tokenizer test"):
        _loader(data_config(ours, seq_len=2, split=(1, 0, 0), vocab_size=300))


def test_large_ids_behind_the_scanned_part_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr("megalite.data.corpus.SCAN_TOKENS", 4)
    foreign = write_corpus(tmp_path / "f", [[1, 2, 3, 4, 5, 299, 7]], vocab_size=1000)
    loader = _loader(data_config(foreign, seq_len=6, split=(1, 0, 0), vocab_size=200, batch=(1, 1)))
    with pytest.raises(ValueError, match=r"token id 299, which is not below model\.vocab_size=200"):
        loader.microbatches(1)


def test_negative_ids_are_refused(tmp_path):
    corpus = write_corpus(tmp_path / "f", [[1, 2, 3]], vocab_size=70000)
    np.array([1, -5, 3], "<i4").tofile(tmp_path / "f.bin")
    with pytest.raises(ValueError, match="negative id -5"):
        _loader(data_config(corpus, seq_len=2, split=(1, 0, 0)))


def test_what_cannot_be_trained_on_is_refused(tmp_path):
    corpus = write_corpus(tmp_path / "x", numbered(40))
    with pytest.raises(
        ValueError, match=r"batch\.seq_len=64 needs 65 tokens, but the train part of .*x has 39 of its 40"
    ):
        _loader(data_config(corpus, seq_len=64))
    with pytest.raises(ValueError, match=r"data\.split=.* leaves no valid data"):
        _loader(data_config(corpus, seq_len=8, split=(1, 0, 0)), "valid")
    with pytest.raises(ValueError, match=r"data\.train is empty"):
        _loader(data_config(seq_len=8))
    with pytest.raises(ValueError, match=r"nowhere\.idx: no such file"):
        _loader(data_config(str(tmp_path / "nowhere"), seq_len=8))
    with pytest.raises(ValueError, match=r"global_batch_size=4 is not a multiple of micro_batch_size 1 x dp 3"):
        _loader(data_config(corpus, seq_len=8), size=3)
    with pytest.raises(ValueError, match="steps count from 1"):
        _loader(data_config(corpus, seq_len=8)).microbatches(0)


def test_sidecar_of_another_corpus_is_refused(tmp_path):
    write_corpus(tmp_path / "x", numbered(40), eod_id=1)
    stale = (tmp_path / "x.json").read_text()
    corpus = write_corpus(tmp_path / "x", numbered(41), eod_id=1)
    (tmp_path / "x.json").write_text(stale)
    with pytest.raises(ValueError, match=r"x\.json describes 1 documents of 40 tokens, but the \.idx has 1 of 41"):
        _loader(data_config(corpus, seq_len=8))
    (tmp_path / "x.json").write_text(stale.replace("megalite-corpus-1", "megalite-corpus-9"))
    with pytest.raises(ValueError, match="megalite-corpus-9"):
        _loader(data_config(corpus, seq_len=8))


def test_json_of_somebody_else_is_ignored(tmp_path):
    corpus = write_corpus(tmp_path / "x", numbered(40))
    (tmp_path / "x.json").write_text('{"vocab_size": 5}')
    assert _loader(data_config(corpus, seq_len=8)).corpora[0].sidecar is None


def test_describe_names_every_corpus(corpus):
    text = _loader(data_config(corpus, seq_len=16)).describe()
    assert corpus in text
    assert "2,049 tokens" in text
