"""The collectives of a training step by themselves: noted as torch's dispatcher sees them, then called again.

Works for whatever is built on torch.distributed, since every call passes the dispatcher; only what a backend sends by
itself (shared memory) or calls from C++ threads does not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

SKIPPED = ("wait_tensor", "_wrap_tensor_autograd", "barrier")


@dataclass(frozen=True)
class Blank:
    """A tensor of a call, without its numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Call:
    """One collective: the operator and its arguments, tensors as Blanks."""

    function: Callable
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        """`recv_` of c10d::recv_."""
        return self.function.name().split("::")[1].split(".")[0]


class Recorder(TorchDispatchMode):
    """Notes every collective that is called in its context, in order."""

    def __init__(self):
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        namespace, name = function.name().split("::")
        if namespace in ("c10d", "_c10d_functional") and name.split(".")[0] not in SKIPPED:
            blank = lambda t: Blank(tuple(t.shape), t.dtype)  # noqa: E731
            noted = tree_map_only(Tensor, blank, (args, kwargs or {}))
            self.calls.append(Call(function, *noted))
        return function(*args, **(kwargs or {}))


class Replay:
    """Calls recorded collectives again, one after the other, each waited for; no computation in between.

    Receives and the sends that belong to them are begun together and waited for together.
    Memory: one buffer for each place in the argument list and each shape.
    """

    def __init__(self, calls: list[Call]):
        buffers: dict[tuple, Tensor] = {}
        self.exchanges = [[self._bound(call, buffers) for call in group] for group in exchanges(calls)]

    def _bound(self, call: Call, buffers: dict[tuple, Tensor]) -> tuple[Callable, tuple, dict]:
        place = 0

        def buffer(blank: Blank) -> Tensor:
            nonlocal place
            place += 1
            return buffers.setdefault((place, blank), torch.zeros(blank.shape, dtype=blank.dtype))

        return call.function, *tree_map_only(Blank, buffer, (call.args, call.kwargs))

    def run(self) -> None:
        """All of them."""
        for group in self.exchanges:
            for result in [function(*args, **kwargs) for function, args, kwargs in group]:
                if isinstance(result, Tensor):
                    torch.ops._c10d_functional.wait_tensor(result)
                else:
                    work = result[-1] if isinstance(result, tuple) else result
                    dist.distributed_c10d.Work.unbox(work).wait()


def exchanges(calls: list[Call]) -> list[list[Call]]:
    """The calls in groups that are waited for together: as few calls as hold as many sends as receives, since a receive
    alone would wait for a send that the other rank has not begun either."""
    groups: list[list[Call]] = []
    missing_sends = 0
    for call in calls:
        if missing_sends == 0:
            groups.append([])
        groups[-1].append(call)
        missing_sends += (call.name == "recv_") - (call.name == "send")
    return groups
