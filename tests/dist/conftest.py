"""Start the rank server while pytest collects, and end it and all ranks with the session."""

import pytest

from tests.dist.pool import SERVER
from tests.kernels import symm_host


@pytest.fixture(scope="module")
def library():
    """The symmetric collectives' CUDA sources as a library of this host."""
    return symm_host.library()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the server import torch while the first tests start, if any collected test needs ranks."""
    if any("/dist/" in item.path.as_posix() for item in session.items) and not session.config.option.collectonly:
        SERVER.start()


def pytest_sessionfinish() -> None:
    """End all ranks, also after a failed or interrupted session."""
    SERVER.stop()
