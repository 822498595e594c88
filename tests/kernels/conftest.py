"""Triton kernels run in its interpreter here, which needs no GPU; triton reads this when a kernel is decorated."""

import os

os.environ["TRITON_INTERPRET"] = "1"
