"""Runs of elements as the compiled kernels take them: a table of addresses."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megalite.kernels.adamw.hyper import Tensors


def native_copy(one: Tensors) -> Tensor | None:
    """The copy that a compiled kernel writes itself; they know bf16 only."""
    return one.out_copy if one.out_copy is not None and one.out_copy.dtype == torch.bfloat16 else None


def address_table(tensors: Sequence[Tensors]) -> np.ndarray:
    """Rows of main, grad, exp_avg, exp_avg_sq, bf16 copy or 0, number of elements; int64 (num, 6)."""
    rows = []
    for one in tensors:
        copy = native_copy(one)
        read = (one.main, one.grad, one.exp_avg, one.exp_avg_sq)
        rows.append([*(t.data_ptr() for t in read), 0 if copy is None else copy.data_ptr(), one.main.numel()])
    return np.array(rows, dtype=np.int64).reshape(-1, 6)


def finish(tensors: Sequence[Tensors]) -> None:
    """Make the copies that the kernel did not, and tell autograd of what was written behind its back."""
    for one in tensors:
        copy = native_copy(one)
        if one.out_copy is not None and copy is None:
            one.out_copy.copy_(one.main)
        written = [one.main, one.exp_avg, one.exp_avg_sq, *([] if copy is None else [copy])]
        torch.autograd.graph.increment_version(written)
