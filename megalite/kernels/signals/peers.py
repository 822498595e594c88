"""What a kernel is told of its peers, and the host's look at waits that gave up. Needs no triton.

[Note: one call] Each op on a symmetric buffer goes through the same phases, call after call, in one order on all ranks:
begin   epoch := e, then wait until every peer has set DONE here to at least the epoch that last used this buffer (e - 2
        when two buffers alternate): all have read what it held
main    data is written, then READY := e is released at those who read it; they acquire READY before they read
finish  everything that reads peer-written data is over on this rank's stream: DONE := e at every peer
A flag has one writer, is never reset and is compared as a signed difference, so that epochs may wrap. Begin and finish
are kernels of one program; epochs lie in device memory, so that a captured graph may be replayed with any rotation of
buffers, if all ranks replay the same.

[Note: who may spin] A wait can last as long as a peer takes, so it must not keep from running what ends it. Begin waits
for calls that are over here, so nothing of this call ends it. Gates of AG+GEMM wait for copies, enqueued before the
GEMM on every rank, which take no processor (and one stays free, see gemm_plan). In GEMM+RS and GEMM+AR programs that
multiply never wait. Those that pull wait for multiplying programs only, here or at a peer; they are fewer than the
processors, so that multiplying programs always find room and come to their end. The kernel that collects an
all-reduce comes after the main one on the same stream. Modules load at the first launch, which may wait for the
device: what runs there by then ends without this rank's next launch, by the same reasons.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

READY, DONE, RESULT = 0, 1, 2
"""Columns of a flags tensor."""
COLUMNS = ("READY", "DONE", "RESULT")
SPINS_PER_S = {"cuda": 1_000_000, "cpu": 4_000}
"""How often a wait looks at its flag: on a GPU an L2 access and two block barriers each, in the interpreter Python."""
MAX_SPINS = (1 << 31) - 1


@dataclass(frozen=True)
class Peers:
    """One rank's view of a symmetric buffer's flags.

    flags:         (W, F) int32, this rank's; row s is written by rank s.
    flag_pointers: (W,) int64, the addresses of all ranks' flags.
    epoch:         (1,) int32, calls begun.
    counters:      (W + 1,) int32 of this rank alone, zero after begin.
    errors:        (6,) int32 of this rank alone: 1 after a wait gave up, rank, peer, column, expected, got.
    used:          (num_buffers,) int32 of this rank alone, the epoch that last used each buffer.
    limit:         how often a wait looks before it gives up.
    share:         ranks that run on this device at the same time.
    """

    rank: int
    size: int
    flags: Tensor
    flag_pointers: Tensor
    epoch: Tensor
    counters: Tensor
    errors: Tensor
    used: Tensor
    limit: int
    share: int = 1


def spin_limit(timeout_s: float, device: torch.device) -> int:
    """Looks at a flag within about `timeout_s`."""
    return max(1, min(MAX_SPINS, int(timeout_s * SPINS_PER_S[device.type])))


class Failures:
    """The error word of one rank's waits, copied to the host behind each call and looked at without a wait.

    The first wait that gives up writes it; later waits then end at once, and every later check raises. On a GPU that is
    the first check after the host has waited for it; until then results are NaN, which makes the step skip its update.
    """

    def __init__(self, device: torch.device, *, ranks: tuple[int, ...], timeout_s: float):
        self.errors = torch.zeros(6, dtype=torch.int32, device=device)
        self.ranks = ranks
        self.timeout_s = timeout_s
        self._host = torch.zeros(6, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._copied = torch.get_device_module(device).Event()

    def copy(self) -> None:
        """Start to copy the word, in stream order."""
        self._host.copy_(self.errors, non_blocking=True)
        self._copied.record()

    def check(self) -> None:
        """Look at the last copy, if it has arrived.

        Raises:
            RuntimeError: a wait gave up; with both global ranks, what was waited for and what was there.
        """
        if not self._copied.query() or not self._host[0]:
            return
        _, rank, peer, column, expected, got = self._host.tolist()
        raise RuntimeError(
            f"overlap.backend=symm: rank {self.ranks[rank]} waited about {self.timeout_s:g} s for {COLUMNS[column]} of "
            f"rank {self.ranks[peer]}: expected call {expected}, found {got}; rank {self.ranks[peer]} is dead, hangs "
            "or is slower than run.timeout_s allows"
        )
