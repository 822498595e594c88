"""Sum of squares in CUDA (csrc/grad_norm.cu): per block, then over blocks, without atomics.

Numerics: squares and sums in fp64, in an order that depends on the number of elements only.
"""

import torch
from torch import Tensor

from megalite import native
from megalite.kernels.adamw.cuda_impl import problem

__all__ = ["problem", "square_sum"]


def square_sum(grad: Tensor) -> Tensor:
    """As reference.square_sum, on the current stream."""
    extension = native.load()
    with torch.cuda.device(grad.device):
        scratch = torch.empty(extension.SQUARE_SUM_SCRATCH + 1, dtype=torch.float64, device=grad.device)
        total = scratch[-1]
        stream = torch.cuda.current_stream(grad.device).cuda_stream
        extension.square_sum_cuda(grad.data_ptr(), grad.numel(), scratch.data_ptr(), total.data_ptr(), stream)
    return total
