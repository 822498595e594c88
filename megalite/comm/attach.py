"""Which way each group's collectives go: through the process group, or through memory that its ranks share.

Invariant: the choice for a group is made from what all ranks of the job told each other once, so it is the same on all
ranks of the group. Point-to-point messages always use process groups.
"""

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from megalite.comm.attach_symm import attach_symm
from megalite.comm.segment import (
    SHM_DIR,
    Process,
    SegmentError,
    gather_objects,
    pid_namespace,
    share,
    shared_memory_missing,
    this_process,
)
from megalite.comm.shm import ShmChannel, Tuning, segment_bytes
from megalite.comm.threads import let_compute_go_on
from megalite.config.schema import Comm
from megalite.mesh import Group, Mesh
from megalite.observe.log import get_logger

WITH_COLLECTIVES = ("world", "pp", "dp", "dp_replicate", "dp_shard", "tp", "kv", "tied")
"""The groups of a mesh that have collectives: all but pp_backward."""
SLOT_BYTES = {2: 1 << 18}
"""Of one of a rank's two buffers, by group size; otherwise OTHER_SLOT_BYTES. Half the L2 of a core is too much."""
OTHER_SLOT_BYTES = 1 << 19
SMALLEST_SLOT_BYTES = 1 << 14
"""Slots are halved down to this where /dev/shm is small."""
MAX_SLOTS_BYTES = 1 << 24
"""Of all slots of one group."""
PATIENCE = {False: (2000, 20), True: (100, 4)}
"""Spins and yields before sleeping; True: this host has more ranks than cores."""


@dataclass(frozen=True)
class _Rank:
    """What one rank tells the others."""

    host: tuple
    """Equal for ranks that see the same /dev/shm and each other's pids."""
    hostname: str
    process: Process
    missing: str | None
    """Why this rank can't use shared memory."""


def attach_channels(mesh: Mesh, comm: Comm, *, timeout_s: float) -> Mesh:
    """Give the mesh's groups the local channels that `comm` asks for; collective over the world group.

    Raises:
        ValueError: comm.cpu_backend=shm or comm.cuda_backend=symm can't be met, with the reason; on all ranks.
    """
    if mesh.world.size == 1:
        return mesh
    if mesh.device.type != "cpu":
        if comm.cpu_backend == "shm":
            raise ValueError(
                f"comm.cpu_backend=shm is for CPU ranks, these are on {mesh.device.type}; leave it out, or use "
                "run.device=cpu"
            )
        return attach_symm(mesh, comm, WITH_COLLECTIVES, timeout_s=timeout_s)
    if comm.cuda_backend == "symm":
        raise ValueError(
            "comm.cuda_backend=symm is for GPUs, these ranks are on cpu; leave it out, or use run.device=cuda"
        )
    rows: list[_Rank] = gather_objects(_this_rank(), mesh.world.pg)
    crowded = sum(row.host == rows[mesh.rank].host for row in rows) > _num_cores()
    let_compute_go_on(crowded=crowded)
    if comm.cpu_backend == "gloo":
        return mesh
    groups = {getattr(mesh, name).ranks for name in WITH_COLLECTIVES if getattr(mesh, name).size > 1}
    problems = {ranks: problem for ranks in sorted(groups) if (problem := _problem(rows, ranks))}
    fitting = sorted(groups - set(problems))
    first = next((text for row in gather_objects(list(problems.values()), mesh.world.pg) for text in row), None)
    if first is None or comm.cpu_backend == "auto":
        segments, full = _segments(fitting, mesh, timeout_s)
        first = first or full
    if first and comm.cpu_backend == "shm":
        raise ValueError(f"comm.cpu_backend=shm is not possible: {first}; use comm.cpu_backend=auto or gloo")
    if first and mesh.rank == 0:
        get_logger().info("collectives of CPU ranks go through gloo where memory can't be shared: %s", first)
    channels = {
        ranks: _channel(segment, ranks, rows, mesh.rank, replace(tuning, **_patience(crowded)))
        for ranks, (segment, tuning) in segments.items()
    }
    return replace(mesh, **dict(_with_channels(mesh, channels)))


def _this_rank() -> _Rank:
    boot = Path("/proc/sys/kernel/random/boot_id")
    missing = shared_memory_missing()
    host = (boot.read_text() if boot.exists() else "", pid_namespace(), missing or SHM_DIR.stat().st_dev)
    return _Rank(host, socket.gethostname(), this_process(), missing)


def _problem(rows: list[_Rank], ranks: tuple[int, ...]) -> str | None:
    """Why these ranks can't share memory, or None."""
    for rank in ranks:
        if rows[rank].missing:
            return f"on rank {rank}, {rows[rank].missing}"
        if rows[rank].host != rows[ranks[0]].host:
            hosts = f"{rows[ranks[0]].hostname} and {rows[rank].hostname}"
            return f"ranks {ranks[0]} and {rank} are not on one host or not in one container ({hosts})"
    return None


def _segments(
    groups: list[tuple[int, ...]], mesh: Mesh, timeout_s: float
) -> tuple[dict[tuple[int, ...], tuple[Tensor, Tuning]], str | None]:
    """A segment for each group, with smaller slots where /dev/shm is small; nothing and the reason where it is full."""
    shrink = 1
    while True:
        tunings = {ranks: Tuning(slot_bytes=_slot_bytes(len(ranks), shrink), timeout_s=timeout_s) for ranks in groups}
        wanted = {ranks: segment_bytes(len(ranks), tuning) for ranks, tuning in tunings.items()}
        try:
            segments = share(wanted, rank=mesh.rank, pg=mesh.world.pg)
        except SegmentError as error:
            shrink *= 2
            if not error.no_space or OTHER_SLOT_BYTES // shrink < SMALLEST_SLOT_BYTES:
                return {}, str(error)
        else:
            return {ranks: (segments[ranks], tunings[ranks]) for ranks in groups}, None


def _slot_bytes(size: int, shrink: int) -> int:
    """At least 64 bytes for each rank; a multiple of 128."""
    wanted = min(SLOT_BYTES.get(size, OTHER_SLOT_BYTES), MAX_SLOTS_BYTES // (2 * size)) // shrink
    return max(wanted // 128, size) * 128


def _patience(crowded: bool) -> dict[str, int]:
    return dict(zip(("spins", "yields"), PATIENCE[crowded], strict=True))


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _channel(segment: Tensor, ranks: tuple[int, ...], rows: list[_Rank], rank: int, tuning: Tuning) -> ShmChannel:
    processes = [rows[r].process for r in ranks]
    return ShmChannel(segment, ranks.index(rank), ranks=ranks, processes=processes, tuning=tuning)


def _with_channels(mesh: Mesh, channels: dict[tuple[int, ...], ShmChannel]) -> Iterable[tuple[str, Group]]:
    """Groups of the same ranks share a channel: their calls come in one order anyway."""
    for name in WITH_COLLECTIVES:
        group = getattr(mesh, name)
        if group.size > 1:
            yield name, replace(group, local=channels.get(group.ranks))
