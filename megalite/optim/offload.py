"""Optimizer state in host memory: gradients come down, the CPU updates, new values go up.

All copies run on a stream of their own. A unit's gradient leaves the device when its reduction is done, under the
backward of the units before it; while the CPU updates one unit the gradients of the next ones arrive and the new values
of the former ones leave. On a CPU device streams and events are torch's stand-ins and the
copies plain ones, so the same lines run.

Memory: on the device the moments are gone (8 bytes per element of the shard in fp32), with `main` the main params too
(4). On the host, pinned: moments 8 (4 in bf16), main params 4, gradients 4, with `main` a compute copy of 2.
Reference: Ren et al., arXiv:2101.06840 (ZeRO-Offload).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.parallel.zero.unit import Unit


@dataclass
class HostCopy:
    """One unit's shard on the host. `copy` is None unless the host makes the compute copy."""

    main: Tensor
    grad: Tensor
    copy: Tensor | None
    arrived: object
    """The event after which main and grad may be read."""


def empty_on_host(like: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """A host tensor of the same length; pinned where the device copies by itself."""
    return torch.empty(like.shape, dtype=dtype or like.dtype, pin_memory=like.device.type != "cpu")


class HostUnits:
    """The host copies of all units.

    Args:
        main: main params stay on the host: `unit.main` becomes the host's tensor, the device keeps the compute shard.
    """

    def __init__(self, units: dict[str, Unit], device: torch.device, *, main: bool):
        self.units = units
        self.main = main
        self.device_module = torch.get_device_module(device)
        self.stream = self.device_module.Stream()
        self.copies = {name: self._make(unit) for name, unit in units.items()}
        self.taken: dict[str, int] = {}
        """Elements of each unit's gradient that are copied or being copied, by the order of their first."""

    def _make(self, unit: Unit) -> HostCopy:
        made = HostCopy(empty_on_host(unit.main), empty_on_host(unit.grad), None, self.device_module.Event())
        if self.main:
            made.main.copy_(unit.main)
            unit.main = made.main
            if unit.shard.dtype != made.main.dtype:
                made.copy = empty_on_host(made.main, dtype=unit.shard.dtype)
        return made

    def begin_step(self) -> None:
        """Gradients may be overwritten after this, also where no update has read the copies."""
        self.device_module.current_stream().wait_stream(self.stream)
        self.taken.clear()

    def side(self) -> AbstractContextManager[None]:
        """Run on the stream of the copies, behind what the current stream has been given so far."""
        self.stream.wait_stream(self.device_module.current_stream())
        return self.device_module.stream(self.stream)

    def mark(self) -> object:
        """An event of what the stream of the copies has been given so far."""
        event = self.device_module.Event()
        event.record(self.stream)
        return event

    def wait(self, event: object) -> None:
        """Have the current stream wait for it."""
        self.device_module.current_stream().wait_event(event)

    def take(self, unit: Unit, segments: list[tuple[int, int]]) -> None:
        """Begin to copy slices of the unit's gradient, which nothing changes any more in this step; with the first
        ones the main params go."""
        host = self.copies[unit.name]
        with self.side():
            if unit.name not in self.taken and not self.main:
                host.main.copy_(unit.main, non_blocking=True)
            for begin, end in segments:
                host.grad[begin:end].copy_(unit.grad[begin:end], non_blocking=True)
            host.arrived.record(self.stream)
        self.taken[unit.name] = self.taken.get(unit.name, 0) + sum(end - begin for begin, end in segments)

    def arriving(self) -> Iterator[Unit]:
        """Yield each unit when its main params and gradient are on the host, in the order in which they were taken;
        what the caller then makes of them goes back to the device. The current stream waits for all of it in the end.

        Units whose gradient nobody gave to `take` as a whole since the last update are taken now.
        """
        for name, unit in self.units.items():
            if self.taken.get(name) != unit.grad.numel():
                self.take(unit, [(0, unit.grad.numel())])
        for name in list(self.taken):
            self.copies[name].arrived.synchronize()
            yield self.units[name]
            with self.device_module.stream(self.stream):
                self._send(self.units[name], self.copies[name])
        self.device_module.current_stream().wait_stream(self.stream)
        self.taken.clear()

    def _send(self, unit: Unit, host: HostCopy) -> None:
        if self.main:
            values = host.main if host.copy is None else host.copy.copy_(host.main)
            unit.shard.copy_(values, non_blocking=True)
            return
        unit.main.copy_(host.main, non_blocking=True)
        if unit.shard is not unit.main:
            unit.shard.copy_(unit.main)
