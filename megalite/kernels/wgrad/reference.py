"""Weight gradients added into a main gradient of a wider dtype: main += dy^T x with one rounding, in main's dtype.

On CUDA, 16-bit factors go to `torch.addmm(out_dtype=fp32)`, which multiplies them as they are and adds in fp32 in the
GEMM's epilogue; else the factors are cast. Both write in place: a main gradient that is not contiguous is refused,
since a GEMM would silently work on a copy.
"""

import torch
from torch import Tensor


def accumulate(main: Tensor, dy: Tensor, x: Tensor) -> None:
    """main (out, in) += dy (M, out)^T @ x (M, in); products and sums in main's dtype.

    Raises:
        ValueError: main is not contiguous.
    """
    if not main.is_contiguous():
        raise ValueError(f"main gradient {tuple(main.shape)} has strides {main.stride()}; it must be contiguous")
    if _mixed_gemm(main, dy, x):
        torch.addmm(main, dy.t(), x, out_dtype=main.dtype, out=main)
        return
    if dy.dtype != main.dtype:
        dy = dy.to(main.dtype)
    if x.dtype != main.dtype:
        x = x.to(main.dtype)
    main.addmm_(dy.t(), x)


def _mixed_gemm(main: Tensor, dy: Tensor, x: Tensor) -> bool:
    """Whether the library has a GEMM from these dtypes into main's."""
    narrow = dy.dtype == x.dtype and dy.dtype in (torch.bfloat16, torch.float16)
    return narrow and main.dtype == torch.float32 and main.device.type == "cuda"
