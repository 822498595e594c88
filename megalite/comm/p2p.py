"""Point-to-point messages between pipeline stages: always asynchronous, buffers held until the wait.

Invariant: activations and gradients travel on different process groups, and both ends of a pair post their messages
in the same order (`parallel/pp/lower.py` makes it so), so messages can't swap even when previous and next are the
same rank (pp = 2).
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from megalite.mesh import Group


@dataclass
class Message:
    """One message on its way; keeps its tensor alive until `wait()`."""

    tensor: Tensor
    handle: dist.Work | None

    def wait(self) -> Tensor:
        """Block until the tensor may be read (received) or reused (sent)."""
        if self.handle is not None:
            self.handle.wait()
            self.handle = None
        return self.tensor


def isend(tensor: Tensor, group: Group, *, to: int, tag: int, site: str = "") -> Message:
    """Start sending a contiguous `tensor` to the group's rank `to`."""
    group.ledger.record(group.axis, "send", site, tensor.nbytes)
    return Message(tensor, dist.isend(tensor, group.ranks[to], group=group.pg, tag=tag))


def irecv(tensor: Tensor, group: Group, *, source: int, tag: int) -> Message:
    """Start receiving into `tensor` from the group's rank `source`."""
    return Message(tensor, dist.irecv(tensor, group.ranks[source], group=group.pg, tag=tag))
