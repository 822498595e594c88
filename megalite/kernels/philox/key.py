"""Keys of random streams: a stable 64-bit hash of the seed and a name."""

from hashlib import blake2b

Key = tuple[int, int]
"""Two 32-bit words."""


def stream_key(seed: int, *name: str | int) -> Key:
    """The Philox key of the stream `name` under `seed`; equal on every rank, machine and Python."""
    text = "\x1f".join(str(part) for part in (seed, *name))
    digest = blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
