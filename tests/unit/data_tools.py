"""What the data tests share: a corpus of known tokens and a config that reads it."""

from pathlib import Path

import numpy as np

from megalite.config.schema import Batch, Config, Data, Model, Source
from megalite.data.sidecar import Sidecar, sidecar_path, to_json
from megalite.data.writer import IndexedWriter, token_dtype


def write_corpus(prefix: Path, documents: list, *, vocab_size: int = 1000, eod_id: int | None = None) -> str:
    """Write documents as one corpus; with an eod_id also the sidecar, as if it was prepared here."""
    with IndexedWriter(str(prefix), token_dtype(vocab_size), vocab_size=vocab_size) as writer:
        for document in documents:
            writer.add_document(document)
        extra = {}
        if eod_id is not None:
            record = Sidecar("test", "", vocab_size, eod_id, writer.num_documents, writer.num_tokens, "00", 0)
            extra = {sidecar_path(str(prefix)): to_json(record).encode()}
        writer.finish(extra)
    return str(prefix)


def numbered(count: int, *, documents: int = 1, first: int = 0) -> list[np.ndarray]:
    """Tokens first, first + 1, ... cut into documents, so that every token of a corpus is a different number."""
    return np.array_split(np.arange(first, first + count), documents)


def data_config(
    *paths: str, seq_len: int, batch: tuple[int, int] = (4, 1), vocab_size: int = 100000, steps: int = 10, **data
) -> Config:
    """A config whose batch is (global_batch_size, micro_batch_size); `data` are fields of the data section."""
    weights = data.pop("weights", [1.0] * len(paths))
    return Config(
        model=Model(num_layers=1, hidden_size=8, num_heads=1, vocab_size=vocab_size, max_seq_len=seq_len),
        batch=Batch(global_batch_size=batch[0], micro_batch_size=batch[1], seq_len=seq_len),
        data=Data(train=[Source(path=p, weight=w) for p, w in zip(paths, weights, strict=True)], **data),
        run={"steps": steps},
    )
