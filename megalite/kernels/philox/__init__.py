"""Counter-based random numbers."""

from megalite.kernels.philox.key import Key, stream_key
from megalite.kernels.philox.op import fill_keep, fill_normal

__all__ = ["Key", "fill_keep", "fill_normal", "stream_key"]
