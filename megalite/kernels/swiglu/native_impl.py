"""SwiGLU on the CPU in C++ (csrc/swiglu_cpu.cpp), with the signatures of reference.py.

Numerics: fp32 inside; every vector level and number of threads gives the same bits.
"""

import torch
from torch import Tensor

from megalite import native
from megalite.kernels.native_calls import how, problem
from megalite.kernels.tiles import as_rows

__all__ = ["backward", "forward", "problem"]


def forward(gate_up: Tensor) -> Tensor:
    """silu(gate) * up."""
    rows = as_rows(gate_up)
    width = rows.shape[1] // 2
    out = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype)
    sizes = (rows.shape[0], width)
    native.load().swiglu(0, 0, rows.data_ptr(), rows.stride(0), out.data_ptr(), sizes, **how(rows))
    return out


def backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """d(gate_up), a new tensor."""
    rows, grads = as_rows(gate_up), as_rows(dy)
    out = torch.empty(gate_up.shape, dtype=gate_up.dtype)
    native.load().swiglu(
        grads.data_ptr(),
        grads.stride(0),
        rows.data_ptr(),
        rows.stride(0),
        out.data_ptr(),
        tuple(grads.shape),
        **how(rows, grads),
    )
    return out
