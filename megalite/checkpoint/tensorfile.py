"""Writes one .safetensors file in a single pass: header, then each tensor's bytes, hashed as they go, fsynced.

The format is that of the safetensors package (8-byte header length, JSON header, raw little-endian data), which also
reads the files. Written here because the package's writer copies the whole file's content in memory first and can't
hash what it writes. Memory: one tensor's CPU copy at a time.
"""

import hashlib
import json
import os
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint.manifest import FileEntry

DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_CHUNK_BYTES = 1 << 24


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> FileEntry:
    """Write contiguous tensors under their keys; wide dtypes first, so that every tensor is aligned.

    Raises:
        OSError: from the file system; a partial file may be left behind.
    """
    order = sorted(tensors, key=lambda key: -tensors[key].element_size())
    header, position = {}, 0
    for key in order:
        tensor = tensors[key]
        ends = [position, position + tensor.nbytes]
        header[key] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": ends}
        position = ends[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "wb", buffering=0) as file:
        for chunk in (len(text).to_bytes(8, "little"), text):
            _write(file, memoryview(chunk), digest)
        for key in order:
            _write(file, _bytes(tensors[key]), digest)
        os.fsync(file.fileno())
    return FileEntry(8 + len(text) + position, digest.hexdigest())


def fsync_directory(path: Path) -> None:
    """Make the directory's entries durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def _write(file, data: memoryview, digest) -> None:
    while data:
        chunk = data[:_CHUNK_BYTES]
        written = file.write(chunk)
        digest.update(chunk[:written])
        data = data[written:]
