"""`megalite data inspect`: what a corpus holds, as text."""

import numpy as np

from megalite.data.indexed import Indexed, open_indexed
from megalite.data.sidecar import Sidecar, file_sha256, read_sidecar, tokenizer_path
from megalite.data.tokenizer import load_tokenizer

SHOWN_TOKENS = 200


def inspect(prefix: str) -> str:
    """Describe PREFIX.bin and PREFIX.idx: type, sizes, lengths, and the first document, decoded when that is possible.

    Raises:
        ValueError: the corpus is damaged, or its tokenizer is not the one that it was prepared with.
    """
    prefix = prefix.removesuffix(".bin").removesuffix(".idx")
    indexed, sidecar = open_indexed(prefix), read_sidecar(prefix)
    lengths = indexed.document_lengths
    quantiles = np.quantile(lengths, [0, 0.1, 0.5, 0.9, 1], method="nearest")
    lines = [
        f"{prefix}: {indexed.tokens.dtype.name}, {indexed.num_documents:,} documents, "
        f"{len(indexed.sequence_lengths):,} sequences, {indexed.num_tokens:,} tokens, {indexed.tokens.nbytes:,} bytes",
        "tokens per document: "
        + ", ".join(f"{n} {int(q):,}" for n, q in zip(("min", "10%", "median", "90%", "max"), quantiles, strict=True))
        + f", mean {lengths.mean():,.1f}; {int((lengths == 0).sum()):,} empty",
        f"token ids: {int(indexed.tokens.min())} to {int(indexed.tokens.max())}",
        _origin(indexed, sidecar),
        f"first document: {_first(indexed, sidecar)}",
    ]
    return "\n".join(lines)


def _origin(indexed: Indexed, sidecar: Sidecar | None) -> str:
    if sidecar is None:
        return "tokenizer: not recorded (the corpus was not prepared by megalite)"
    ends = indexed.document_starts[1:][indexed.document_lengths > 0] - 1
    ended = int((indexed.tokens[ends] == sidecar.eod_id).sum())
    return (
        f"tokenizer: {sidecar.tokenizer}, vocabulary {sidecar.vocab_size}, end of document {sidecar.eod_id} "
        f"(ends {ended:,} documents); text: {sidecar.text_bytes:,} bytes, sha256 {sidecar.text_sha256}"
    )


def _first(indexed: Indexed, sidecar: Sidecar | None) -> str:
    number = int(np.argmax(indexed.document_lengths > 0))
    ids = indexed.document(number)[:SHOWN_TOKENS]
    rest = " ..." if indexed.document_lengths[number] > SHOWN_TOKENS else ""
    if sidecar is None:
        return str(ids.tolist()) + rest
    path = None if sidecar.tokenizer_sha256 == "" else tokenizer_path(indexed.prefix)
    if path is not None and (not path.is_file() or file_sha256(path) != sidecar.tokenizer_sha256):
        raise ValueError(f"{path}: missing, or not the tokenizer that {indexed.prefix} was prepared with")
    return repr(load_tokenizer(path).decode(ids)) + rest
