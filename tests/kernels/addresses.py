"""An address check for Triton's interpreter: a kernel may touch the elements of its tensors and nothing else.

Without it a lost mask goes unnoticed on a CPU, since the memory next to a tensor is just another tensor's.
"""

import math

import numpy as np
import torch
from triton.runtime.interpreter import interpreter_builder

BORDER = 3
"""Elements of NaN around each row of a bordered tensor."""


class Addresses:
    """While a test runs, loads and stores outside the tensors that were allowed raise, and torch.empty is poisoned.

    What is allocated with torch.empty is filled with NaN and allowed.
    """

    def __init__(self, monkeypatch):
        self.allowed = np.empty(0, np.uint64)
        self.num_checked = 0
        self.plain_empty = torch.empty
        monkeypatch.setattr(torch, "empty", self._empty)
        for name, position in (("create_masked_load", 1), ("create_masked_store", 2)):
            monkeypatch.setattr(interpreter_builder, name, self._checked(name, position))

    def bordered(self, x):
        """A copy of x (..., D) with gaps of NaN between its rows, allowed."""
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 2 * BORDER), torch.nan, dtype=x.dtype)
        inner = wide[..., BORDER:-BORDER]
        inner.copy_(x)
        return self.allow(inner)

    def allow(self, x):
        """x itself, whose elements may be touched."""
        offsets = torch.zeros(x.shape, dtype=torch.int64)
        for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
            offsets += (torch.arange(size) * stride).view(-1, *[1] * (x.dim() - dim - 1))
        own = x.data_ptr() + x.element_size() * offsets.flatten().numpy().astype(np.uint64)
        self.allowed = np.union1d(self.allowed, own)
        return x

    def _empty(self, *size, **options):
        made = self.plain_empty(*size, **options)
        if not made.is_floating_point() or math.prod(made.shape) == 0:
            return made
        return self.allow(made.fill_(torch.nan))

    def _checked(self, name, mask_position):
        plain = getattr(interpreter_builder, name)

        def access(pointers, *rest):
            mask = rest[mask_position - 1].data
            active = pointers.data[np.broadcast_to(mask, pointers.data.shape)]
            assert np.isin(active, self.allowed).all(), f"{name} outside the tensors"
            self.num_checked += active.size
            return plain(pointers, *rest)

        return access
