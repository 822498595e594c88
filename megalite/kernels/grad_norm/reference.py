"""Sum of squares of a flat gradient in plain torch."""

import torch
from torch import Tensor

CHUNK = 1 << 20
"""Elements widened at once."""


def square_sum(grad: Tensor) -> Tensor:
    """Sum of the squares of grad (n,), an fp64 scalar on its device.

    Numerics: squares and sums in fp64. Memory: 8 MiB for a part of grad in fp64.
    """
    total = torch.zeros((), dtype=torch.float64, device=grad.device)
    for part in grad.split(CHUNK):
        wide = part.double()
        total += wide.dot(wide)
    return total
