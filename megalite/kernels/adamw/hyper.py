"""What every implementation of AdamW takes: the numbers of an update, and the tensors of one run of elements."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Hyper:
    """`step` counts updates from 1 and drives the bias correction."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int


@dataclass(frozen=True)
class Tensors:
    """Flat tensors of equal length; `out_copy`, of another dtype, receives the new main."""

    main: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    out_copy: Tensor | None = None
