"""AdamW on flat shards: scale, moments, decay, update and the compute copy in one pass."""

from megalite.kernels.adamw.hyper import Hyper, Tensors
from megalite.kernels.adamw.op import adamw_step

__all__ = ["Hyper", "Tensors", "adamw_step"]
