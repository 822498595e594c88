"""Weight gradients added into a main gradient of a wider dtype: main += dy^T x with one rounding, in main's dtype."""

from torch import Tensor


def accumulate(main: Tensor, dy: Tensor, x: Tensor) -> None:
    """main (out, in) += dy (M, out)^T @ x (M, in); products and sums in main's dtype."""
    main.addmm_(dy.t().to(main.dtype), x.to(main.dtype))
