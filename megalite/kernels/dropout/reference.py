"""Dropout as pure functions, in plain torch. Nothing is kept for backward, which draws the same mask again."""

from torch import Tensor

from megalite.kernels.dropout.mask import keep_mask
from megalite.kernels.philox import Key


def forward(x: Tensor, *, p: float, key: Key, starts: tuple[int, ...]) -> Tensor:
    """x / (1 - p) where kept, else 0; see mask.keep_mask for `starts`."""
    mask = keep_mask(x.shape, p=p, key=key, starts=starts, device=x.device)
    return (x * (1.0 / (1.0 - p))).mul_(mask)


def backward(dy: Tensor, *, p: float, key: Key, starts: tuple[int, ...]) -> Tensor:
    """The gradient of forward, the same map."""
    return forward(dy, p=p, key=key, starts=starts)
