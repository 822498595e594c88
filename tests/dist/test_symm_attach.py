"""Which groups get our GPU collectives: the choice of comm.cuda_backend, with the host build for the kernels."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from megalite.comm import attach_symm as module
from megalite.comm.attach import WITH_COLLECTIVES, attach_channels
from megalite.comm.attach_symm import attach_symm
from megalite.comm.collectives import DONE, all_gather, all_reduce, reduce_scatter
from megalite.comm.symm_channel import SymmChannel
from megalite.comm.symmetric import open_heap
from megalite.config.schema import Comm
from megalite.mesh import Group, Mesh, Sizes
from tests.dist.pool import mesh_for, run_ranks
from tests.kernels import symm_host
from tests.kernels.symm_host import HostKernels

CPU = torch.device("cpu")
SYMM = Comm(cuda_backend="symm")
pytestmark = symm_host.ON_A_HEAP


def open_on_host(library, group: Group, device: torch.device, timeout_s: float) -> SymmChannel:
    """A channel of CPU ranks."""
    heap = open_heap(group, backend="shm", device=CPU, timeout_s=timeout_s)
    return SymmChannel(heap, ranks=group.ranks, timeout_s=timeout_s, buffer_bytes=4096, kernels=HostKernels(library))


def plain_mesh(world: int) -> Mesh:
    return mesh_for(Sizes(dp_shard=world // 2, tp=2), cpu_backend="gloo")


def attached(mesh: Mesh, library, comm: Comm = SYMM, why: str | None = None) -> Mesh | str:
    """The mesh with channels, or what was refused."""
    open_channel = partial(open_on_host, library)
    try:
        return attach_symm(
            mesh, comm, WITH_COLLECTIVES, timeout_s=30.0, missing=lambda device: why, open_channel=open_channel
        )
    except ValueError as error:
        return str(error)


def with_channel(mesh: Mesh) -> set[str]:
    return {name for name in WITH_COLLECTIVES if getattr(mesh, name).local is not None}


def on_one_host(rank: int, world: int, library) -> None:
    mesh = attached(plain_mesh(world), library)
    assert with_channel(mesh) == {"world", "dp", "dp_shard", "tp"}
    assert mesh.dp.local is mesh.dp_shard.local is not mesh.tp.local
    x = torch.full((3,), float(rank))
    all_reduce(x, mesh.dp)
    all_reduce(x, mesh.tp)
    assert x.tolist() == [6.0] * 3
    wide = torch.full((3,), float(rank), dtype=torch.float64)  # not for the kernels
    all_reduce(wide, mesh.world)
    assert wide.tolist() == [6.0] * 3
    out = torch.empty(world, 5)
    all_gather(out, torch.full((1, 5), float(rank)), mesh.world)
    assert out[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    part, full = torch.empty(3), torch.arange(3.0 * world) + rank
    assert reduce_scatter(part, full, mesh.world, async_op=True, exclusive=True) is DONE  # in the stream's order
    assert part.tolist() == [4.0 * i + 6.0 for i in range(3 * rank, 3 * rank + 3)]
    assert [mesh.ledger.calls[entry] for entry in mesh.ledger.calls if entry.op == "all_reduce"] == [1, 1, 1]
    mesh.ledger.reset()
    mesh.world.local.barrier()


def test_groups_of_one_host_get_channels(library):
    run_ranks(4, on_one_host, library)


def on_two_hosts(rank: int, world: int, library) -> tuple[set[str], str]:
    mesh = plain_mesh(world)
    real = module._host
    try:
        module._host = lambda: (f"node{rank // 2}", "")
        some = with_channel(attached(mesh, library))
        module._host = lambda: (f"node{rank}", "")
        return some, attached(mesh, library)
    finally:
        module._host = real


def test_groups_across_hosts_keep_nccl(library):
    for some, refusal in run_ranks(4, on_two_hosts, library):
        assert some == {"tp"}
        assert refusal == (
            "comm.cuda_backend=symm is for groups within one host, and this mesh has none; use comm.cuda_backend=nccl"
        )


def not_possible(rank: int, world: int, library) -> list:
    mesh = plain_mesh(world)
    on_gpu = replace(mesh, device=torch.device("cuda"))
    why = "the extension was built without nvcc" if rank == 1 else None

    def refuse(group, device, timeout_s):
        raise RuntimeError("no symmetric memory over the tp ranks: peer access is not supported")

    found = [attached(mesh, library, why=why)]
    for call in (
        lambda: attach_symm(mesh, SYMM, ("tp",), timeout_s=1.0, missing=lambda device: None, open_channel=refuse),
        lambda: attach_channels(mesh, SYMM, timeout_s=1.0),
        lambda: attach_channels(on_gpu, SYMM, timeout_s=1.0),
    ):
        with pytest.raises(ValueError, match="cuda_backend") as caught:
            call()
        found.append(str(caught.value))
    for backend in ("auto", "nccl"):
        assert with_channel(attach_channels(on_gpu, Comm(cuda_backend=backend), timeout_s=1.0)) == set()
    return found


def test_what_is_not_possible_is_said(library):
    for lacking, unreachable, on_cpu, no_gpu in run_ranks(2, not_possible, library):
        assert lacking == (
            "comm.cuda_backend=symm is not possible: on rank 1, the extension was built without nvcc; use "
            "comm.cuda_backend=nccl"
        )
        assert unreachable == (
            "comm.cuda_backend=symm is not possible for tp ranks (0, 1): no symmetric memory over the tp ranks: peer "
            "access is not supported; use comm.cuda_backend=nccl"
        )
        assert on_cpu.startswith("comm.cuda_backend=symm is for GPUs, these ranks are on cpu")
        assert no_gpu.startswith("comm.cuda_backend=symm is not possible: on rank 0, ")
