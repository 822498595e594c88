"""gloo groups that share the devices of the default group.

A device is a listening socket and a thread that moves messages; the thread wakes 100 times a second even when nothing
moves. torch gives every gloo group a device of its own: with eight groups on each of eight ranks of two cores that was
3% of a training step's CPU time (by sampling). torch takes given devices only from a backend that it does not make
itself, so there is one here.
"""

from datetime import timedelta

import torch
import torch.distributed as dist

NAME = "megalite_gloo"
"""Of the backend, in torch's list."""


def backend_of_new_groups() -> str | None:
    """What dist.new_group is to make, once the default group exists; None: torch's own choice.

    That is so on GPUs, where there are no gloo groups, and where torch has hidden its gloo group (behind the checks of
    TORCH_DISTRIBUTED_DEBUG=DETAIL) or does not show its devices.
    """
    if dist.get_backend() != dist.Backend.GLOO or _default_devices() is None:
        return None
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _make, devices=["cpu"])
    return NAME


def _default_devices() -> list | None:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    options = getattr(backend, "options", None)
    return getattr(options, "_devices", None) or None


def _make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> "dist.ProcessGroupGloo":
    """A backend's maker, as torch calls it."""
    options = dist.ProcessGroupGloo._Options()
    options._devices, options._timeout = _default_devices(), timeout
    options._threads = 2 * len(options._devices)
    return dist.ProcessGroupGloo(store, rank, size, options)
