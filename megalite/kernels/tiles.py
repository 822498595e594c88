"""How the elementwise and norm kernels cut their work: columns in blocks, rows over programs. Needs no triton.

Kernels take rows of any stride whose last dim is contiguous; what is laid out otherwise is copied first.
"""

import torch
from torch import Tensor

INTERPRETED_PROGRAMS = 4
"""Programs of a looping kernel off the GPU: few, so that small tests loop too."""


def contiguous_columns(x: Tensor) -> Tensor:
    """x itself if its last dim is contiguous, else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def as_rows(x: Tensor) -> Tensor:
    """x as (M, last dim) with contiguous columns; a view where the strides allow it."""
    return contiguous_columns(as_matrix(x))


def as_matrix(x: Tensor) -> Tensor:
    """x with its leading dims folded into rows. One that has two dims is itself and no view: that would be two more
    nodes of autograd's, and through views of two inputs with one gradient both `.grad` would be one tensor."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def in_shape(rows: Tensor, x: Tensor) -> Tensor:
    """What was made of as_matrix(x), in x's shape."""
    return rows if x.dim() == 2 else rows.view(x.shape)


def num_programs(rows: int, device: torch.device, *, per_processor: int) -> int:
    """How many programs share `rows` rows: what the device holds at once, at least one, at most one per row."""
    most = INTERPRETED_PROGRAMS
    if device.type == "cuda":
        most = per_processor * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(rows, most))


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
