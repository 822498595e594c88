"""Which groups of GPUs use our own collectives over NVLink instead of NCCL (comm.cuda_backend).

Invariant: the choice is made from what all ranks of the job told each other once, so it is the same on all ranks of a
group. Groups within one host get a channel, the others keep NCCL, which the log says.
"""

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from megalite.comm.segment import gather_objects
from megalite.comm.symm_channel import SymmChannel, symm_channel_missing
from megalite.comm.symmetric import open_heap, symmetric_missing
from megalite.config.schema import Comm
from megalite.mesh import Group, LocalChannel, Mesh
from megalite.observe.log import get_logger

OpenChannel = Callable[[Group, torch.device, float], LocalChannel]
WAY_OUT = "use comm.cuda_backend=nccl"


def open_symm_channel(group: Group, device: torch.device, timeout_s: float) -> SymmChannel:
    """A channel over torch's symmetric memory; collective over the group."""
    heap = open_heap(group, backend="torch", device=device, timeout_s=timeout_s)
    return SymmChannel(heap, ranks=group.ranks, timeout_s=timeout_s)


def symm_missing(device: torch.device) -> str | None:
    """Why this rank can't use our collectives between GPUs, or None; says nothing of whether peers reach each other."""
    return symm_channel_missing(device) or symmetric_missing(device)


def attach_symm(
    mesh: Mesh,
    comm: Comm,
    names: tuple[str, ...],
    *,
    timeout_s: float,
    missing: Callable[[torch.device], str | None] = symm_missing,
    open_channel: OpenChannel = open_symm_channel,
) -> Mesh:
    """Give the groups `names` of GPUs their channels if `comm` asks for them; collective over the world group.

    Args:
        missing, open_channel: stand in for the GPU's in tests.

    Raises:
        ValueError: comm.cuda_backend=symm can't be met, with the reason; on all ranks.
    """
    if comm.cuda_backend != "symm":
        if comm.cuda_backend == "auto" and mesh.rank == 0:
            get_logger().info(
                "collectives of GPUs go through NCCL: ours were not yet timed over NVLink, so comm.cuda_backend=auto "
                "does not take them (comm.cuda_backend=symm does)"
            )
        return mesh
    rows = gather_objects((_host(), missing(mesh.device)), mesh.world.pg)
    lacking = next(((rank, why) for rank, (_, why) in enumerate(rows) if why), None)
    if lacking:
        raise ValueError(f"comm.cuda_backend=symm is not possible: on rank {lacking[0]}, {lacking[1]}; {WAY_OUT}")
    groups = {group.ranks: group for name in names if (group := getattr(mesh, name)).size > 1}
    own = {ranks for ranks in groups if len({rows[rank][0] for rank in ranks}) == 1}
    every = gather_objects((own, set(groups) - own), mesh.world.pg)
    inside, across = (set().union(*sets) for sets in zip(*every, strict=True))
    if not inside:
        raise ValueError(f"comm.cuda_backend=symm is for groups within one host, and this mesh has none; {WAY_OUT}")
    if across and mesh.rank == 0:
        get_logger().info("comm.cuda_backend=symm: groups across hosts keep NCCL: %s", sorted(across))
    channels = {ranks: _open(groups[ranks], mesh.device, timeout_s, open_channel) for ranks in sorted(own)}
    attached = {name: getattr(mesh, name) for name in names if getattr(mesh, name).ranks in channels}
    return replace(mesh, **{name: replace(group, local=channels[group.ranks]) for name, group in attached.items()})


def _open(group: Group, device: torch.device, timeout_s: float, open_channel: OpenChannel) -> LocalChannel:
    try:
        return open_channel(group, device, timeout_s)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"comm.cuda_backend=symm is not possible for {group.axis} ranks {group.ranks}: {error}; {WAY_OUT}"
        ) from error


def _host() -> tuple[str, str]:
    """Equal for ranks of one running system."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname(), boot.read_text() if boot.exists() else ""
