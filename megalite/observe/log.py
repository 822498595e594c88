"""The one logger of megalite, aware of the rank: rank 0 speaks, others only warn, with their rank in front.

Messages go to stderr, so that stdout stays the progress of the run. The logger is the only global of the package.
"""

import logging
import sys

_NAME = "megalite"


class _StderrHandler(logging.StreamHandler):
    """Writes to whatever sys.stderr is when a message comes, e.g. a live display's replacement."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self):
        """The present sys.stderr."""
        return sys.stderr


def get_logger() -> logging.Logger:
    """Return the logger; usable before `setup_logging`, then with Python's defaults."""
    return logging.getLogger(_NAME)


def setup_logging(rank: int = 0, *, level: int = logging.INFO) -> logging.Logger:
    """Give the logger its handler for this rank: `level` on rank 0, warnings and worse on the others. Idempotent."""
    logger = get_logger()
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    handler = _StderrHandler()
    who = "" if rank == 0 else f"[rank {rank}] "
    handler.setFormatter(logging.Formatter(f"%(asctime)s {who}%(levelname).1s %(message)s", datefmt="%H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(level if rank == 0 else max(level, logging.WARNING))
    logger.propagate = False
    return logger
