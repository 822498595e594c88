"""Sum of squares on the CPU in C++ (csrc/grad_norm_cpu.cpp): AVX2 or AVX-512 and torch's number of threads.

Numerics: squares and sums in fp64, in an order that depends on the number of elements only.
"""

import torch
from torch import Tensor

from megalite import native
from megalite.kernels.adamw.native_impl import problem

__all__ = ["problem", "square_sum"]


def square_sum(grad: Tensor) -> Tensor:
    """As reference.square_sum."""
    total = native.load().square_sum(grad.data_ptr(), grad.numel(), torch.get_num_threads())
    return torch.tensor(total, dtype=torch.float64)
