"""Sum of squares of a flat gradient in plain torch."""

import torch
from torch import Tensor


def square_sum(grad: Tensor) -> Tensor:
    """Sum of the squares of grad (n,), an fp64 scalar on its device.

    Numerics: squares and sums in fp64. Memory: an fp64 copy of grad.
    """
    return torch.linalg.vector_norm(grad, dtype=torch.float64).square()
