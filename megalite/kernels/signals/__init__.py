"""How kernels of several ranks wait for each other: flags, epochs, and what is reported when a peer does not come."""

from megalite.kernels.signals.peers import DONE, READY, RESULT, Failures, Peers, spin_limit

__all__ = ["DONE", "READY", "RESULT", "Failures", "Peers", "spin_limit"]
