"""Signals ask for a stop; the loop ends after the step at which all ranks have agreed on it, and saves."""

import signal
from dataclasses import dataclass

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@dataclass
class StopFlag:
    """Set by SIGTERM, SIGINT or SIGUSR1 (what sbatch --signal sends); a second signal acts at once, as by default."""

    requested: bool = False

    def install(self) -> None:
        """Listen from now on; call it in the main thread."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self.requested = True
        signal.signal(number, signal.SIG_DFL)
