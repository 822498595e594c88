"""Shared by all tests: one thread per process, Triton in its interpreter, GPU tests skipped where there is no GPU."""

import os

import pytest
import torch

torch.set_num_threads(1)
os.environ["TRITON_INTERPRET"] = "1"  # needs no GPU; triton reads it when a kernel is decorated


def pytest_collection_modifyitems(items):
    """Skip what is marked `gpu` on a machine without one; nothing else is ever skipped here."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
