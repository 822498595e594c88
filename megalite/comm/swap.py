"""Two CPU ranks swap large tensors, in both directions at once: all-gather and reduce-scatter of gloo groups of two.

[Note: receives first] gloo announces a receive on the connection that also carries this rank's own messages, in order.
An announcement behind a large message comes late, and the other rank's message waits for it: the directions take turns.
That happens in gloo's own all_gather and all_to_all between two ranks, which then move about half of what a full duplex
line carries. Here every receive is announced before its rank sends anything. In larger groups gloo's rings receive from
one neighbour and send to the other, on connections of their own.
"""

import torch.distributed as dist
from torch import Tensor

from megalite.mesh import Group

LARGE_BYTES = 1 << 18
"""Of a message; below it a call takes its latency either way. The same on all ranks, as messages are."""


def can_swap(group: Group, message: Tensor) -> bool:
    """Whether the group's two ranks should swap such a message rather than call gloo's collective."""
    return group.size == 2 and message.device.type == "cpu" and message.nbytes >= LARGE_BYTES


class Swap:
    """A message to the other rank and one from it, on their way; neither tensor may be touched until the wait.

    Communication: sends `send`.
    """

    def __init__(self, send: Tensor, receive: Tensor, group: Group):
        other = group.ranks[1 - group.rank]
        self._works = [dist.irecv(receive, other, group=group.pg), dist.isend(send, other, group=group.pg)]

    def wait(self) -> None:
        """Return when both have arrived."""
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        """Whether both have arrived, as far as gloo tells: its messages are never known to have before the wait."""
        return all(work.is_completed() for work in self._works)
