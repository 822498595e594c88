"""The checked entry to the kernels that sum the squares of a gradient."""

from torch import Tensor

from megalite.kernels.grad_norm import reference


def square_sum(grad: Tensor, *, impl=reference) -> Tensor:
    """Sum of the squares of grad (n,), an fp64 scalar on its device; no synchronisation.

    Numerics: accumulated in fp64; the same bits in every run, for any number of threads.
    """
    if grad.dim() != 1 or not grad.is_contiguous():
        raise ValueError(f"grad of shape {tuple(grad.shape)} is not flat and contiguous")
    return impl.square_sum(grad)
