"""AdamW on flat tensors in torch's own implementation: the truth, in any floating dtype and on any device.

Loshchilov and Hutter, arXiv:1711.05101. Decay is decoupled: main *= 1 - lr * weight_decay before the update.
"""

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megalite.kernels.adamw.hyper import Hyper


def step(
    main: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    hyper: Hyper,
    scale: Tensor | float = 1.0,
    out_copy: Tensor | None = None,
) -> None:
    """Update main, exp_avg and exp_avg_sq, all (n,), from grad * scale; grad is left as it is.

    Args:
        scale:    a number, or a scalar on the tensors' device.
        out_copy: (n,) in another dtype; receives the new main, rounded to nearest even.

    Memory: a scaled copy of grad unless scale is the number 1.
    """
    scaled = grad if isinstance(scale, float) and scale == 1.0 else grad * scale
    adamw(
        [main],
        [scaled],
        [exp_avg],
        [exp_avg_sq],
        [],
        [torch.tensor(float(hyper.step - 1), device=main.device)],  # adamw counts this update itself
        fused=True,
        amsgrad=False,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        lr=hyper.lr,
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
        maximize=False,
    )
    if out_copy is not None:
        out_copy.copy_(main)
