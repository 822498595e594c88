"""The mesh of ranks: pure arithmetic (rank <-> pp, dp, tp) and the process groups of each axis.

tp is the fastest axis: rank = (pp_index * dp + dp_index) * tp + tp_index. The dp axis is dp_replicate x dp_shard, shard
faster. Every group carries the run's time-out. At size 1 a group has no process group, and every collective on it is
a no-op.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import product
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megalite.gloo import backend_of_new_groups
from megalite.observe.ledger import Ledger


class LocalChannel(Protocol):
    """Collectives of a group whose ranks reach each other's memory; see comm/attach.py for who provides it.

    Calls block (on a GPU: are ordered on the current stream) and leave the same bits on all ranks. A failure is a
    RuntimeError that names the global rank at fault, within the group's time limit.
    """

    def takes(self, *tensors: Tensor) -> bool:
        """Whether a call with such tensors can go this way; from their kind alone, so alike on all ranks."""

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """In place; op is sum, max or min."""

    def all_gather(self, out: Tensor, shard: Tensor) -> None:
        """The ranks' shards in rank order; `shard` may be its own place in `out`."""

    def reduce_scatter(self, out: Tensor, full: Tensor) -> None:
        """This rank's piece of the sum; `out` may be its own place in `full`."""

    def begin_reduce_scatter(self, out: Tensor, full: Tensor) -> Callable[[], None] | None:
        """The same up to where others are waited for; the rest is the call that is returned, before which the channel
        gets no other. None: it is through."""

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """In place, from the group's rank `root`."""

    def barrier(self) -> None:
        """Return when all ranks have called it."""


@dataclass(frozen=True)
class Group:
    """The ranks that differ from this one along `axis` only; what every collective takes."""

    axis: str
    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    pg: dist.ProcessGroup | None = None
    ledger: Ledger = field(default_factory=Ledger, compare=False, repr=False)
    local: LocalChannel | None = field(default=None, compare=False, repr=False)
    """A faster way than `pg` for collectives; None without one."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


@dataclass(frozen=True)
class Sizes:
    """Axis sizes and the arithmetic that follows from them; needs no process group."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    @property
    def dp(self) -> int:
        """Data parallel size."""
        return self.dp_replicate * self.dp_shard

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.tp

    def rank(self, *, pp: int = 0, dp_replicate: int = 0, dp_shard: int = 0, tp: int = 0) -> int:
        """Global rank of the given coordinates."""
        return ((pp * self.dp_replicate + dp_replicate) * self.dp_shard + dp_shard) * self.tp + tp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of a global rank, by axis name."""
        rest, tp = divmod(rank, self.tp)
        rest, shard = divmod(rest, self.dp_shard)
        pp, replicate = divmod(rest, self.dp_replicate)
        return {"pp": pp, "dp_replicate": replicate, "dp_shard": shard, "tp": tp}

    def groups(self, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
        """All groups of ranks that differ only along `axes`, each in rank order."""
        rows: dict[tuple, list[int]] = {}
        for rank in range(self.world):
            at = self.coordinates(rank)
            rows.setdefault(tuple(v for axis, v in at.items() if axis not in axes), []).append(rank)
        return [tuple(row) for row in rows.values()]

    def kv_groups(self, kv_replicas: int) -> list[tuple[int, ...]]:
        """Ranks of one tp group that hold the same kv heads: `kv_replicas` neighbours."""
        return [row[i : i + kv_replicas] for row in self.groups(("tp",)) for i in range(0, self.tp, kv_replicas)]

    def tied_groups(self) -> list[tuple[int, ...]]:
        """The first and the last pipeline rank of each pipeline: they share a tied embedding."""
        return [tuple(sorted({row[0], row[-1]})) for row in self.groups(("pp",))]


@dataclass(frozen=True)
class Mesh:
    """This rank's place and groups. `pp_forward` and `pp_backward` carry activations and gradients on their own
    channels."""

    sizes: Sizes
    rank: int
    device: torch.device
    world: Group
    pp: Group
    pp_backward: Group
    dp: Group
    dp_replicate: Group
    dp_shard: Group
    tp: Group
    kv: Group
    tied: Group
    ledger: Ledger
    device_mesh: DeviceMesh | None = None


AXES = {
    "world": ("pp", "dp_replicate", "dp_shard", "tp"),
    "pp": ("pp",),
    "pp_backward": ("pp",),
    "dp": ("dp_replicate", "dp_shard"),
    "dp_replicate": ("dp_replicate",),
    "dp_shard": ("dp_shard",),
    "tp": ("tp",),
}


def build_mesh(sizes: Sizes, *, device: torch.device, timeout_s: float, kv_replicas: int = 1) -> Mesh:
    """Make this rank's groups; the default process group must exist when sizes.world > 1.

    Communication: creates the groups in the same order on every rank; sends no data.
    """
    ledger = Ledger()
    rank = dist.get_rank() if sizes.world > 1 else 0
    rows = {name: sizes.groups(axes) for name, axes in AXES.items()}
    rows["kv"] = sizes.kv_groups(kv_replicas)
    rows["tied"] = sizes.tied_groups()
    groups = {name: _own_group(name, row, rank, timeout_s, ledger) for name, row in rows.items()}
    device_mesh = _device_mesh(sizes, groups, device) if sizes.world > 1 else None
    return Mesh(sizes=sizes, rank=rank, device=device, ledger=ledger, device_mesh=device_mesh, **groups)


def _own_group(name: str, rows: list[tuple[int, ...]], rank: int, timeout_s: float, ledger: Ledger) -> Group:
    axis = "pp" if name == "pp_backward" else name
    own = next((row for row in rows if rank in row), (rank,))  # middle pipeline ranks are in no tied group
    pg, timeout = None, timedelta(seconds=timeout_s)
    for row in rows:
        if len(row) > 1:  # every rank takes part in the making of every group
            made = dist.new_group(
                list(row), timeout=timeout, backend=backend_of_new_groups(), group_desc=f"{name}{row}"
            )
            pg = made if row == own else pg
    return Group(axis, own, own.index(rank), pg, ledger)


def _device_mesh(sizes: Sizes, groups: dict[str, Group], device: torch.device) -> DeviceMesh | None:
    """The same groups as a torch DeviceMesh, for torch pieces (DTensor, fully_shard) and for its drawing."""
    names = [n for n in ("pp", "dp_replicate", "dp_shard", "tp") if groups[n].size > 1]
    shape = [groups[n].size for n in names]
    ranks = torch.arange(sizes.world).reshape(shape)
    pgs = [groups[n].pg for n in names]
    if len(pgs) == 1:
        return DeviceMesh.from_group(pgs[0], device.type, mesh_dim_names=tuple(names))
    return DeviceMesh.from_group(pgs, device.type, mesh=ranks, mesh_dim_names=tuple(names))


def single_device_mesh(device: torch.device | str = "cpu") -> Mesh:
    """The mesh of one rank, for tests and tools; no process group is needed."""
    return build_mesh(Sizes(), device=torch.device(device), timeout_s=60.0)


def check_world_size(sizes: Sizes, world_size: int) -> None:
    """Refuse a job whose number of ranks is not the product of the mesh axes, with the arithmetic."""
    if world_size != sizes.world:
        raise ValueError(
            f"mesh: pp {sizes.pp} x dp {sizes.dp} x tp {sizes.tp} = {sizes.world} ranks, but the job has {world_size}; "
            f"start {sizes.world} ranks or change mesh.* so that the product is {world_size} "
            f"(e.g. {_fitting(sizes, world_size)})"
        )


def _fitting(sizes: Sizes, world_size: int) -> str:
    """A mesh of `world_size` ranks that keeps as much of the wanted one as possible."""
    options = [
        (pp, tp) for pp, tp in product(range(1, sizes.pp + 1), range(1, sizes.tp + 1)) if world_size % (pp * tp) == 0
    ]
    pp, tp = max(options, key=lambda o: o[0] * o[1])
    return f"mesh.pp={pp} mesh.tp={tp} mesh.dp={world_size // (pp * tp)}"
