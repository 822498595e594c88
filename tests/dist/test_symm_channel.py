"""Our GPU collectives between processes: the CUDA sources built for the host, over the heap in shared memory.

What a GPU runs through NVLink runs here through /dev/shm: the same kernels, the same channel, the same heap contract.
"""

import random
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.comm.symm_channel import SymmChannel, one_shot_limit, symm_channel_missing
from megalite.comm.symmetric import open_heap, virtual_heaps
from megalite.mesh import Sizes
from tests.dist.pool import mesh_for, run_ranks
from tests.kernels import symm_host
from tests.kernels.symm_host import FORMATS, HostKernels, expected, make_inputs

CPU = torch.device("cpu")
BUFFER_BYTES = 4096
pytestmark = symm_host.ON_A_HEAP


def open_channel(library, world: int, *, timeout_s: float = 30.0, jitter_us: int = 200) -> SymmChannel:
    group = mesh_for(Sizes(tp=world)).tp
    heap = open_heap(group, backend="shm", device=CPU, timeout_s=30.0)
    kernels = HostKernels(library, jitter_us=jitter_us)
    return SymmChannel(heap, ranks=group.ranks, timeout_s=timeout_s, buffer_bytes=BUFFER_BYTES, kernels=kernels)


def start_near_the_wrap(channel: SymmChannel) -> None:
    """Steps 2^32 - 4, ...: all rows of this rank's flags as if so many had been taken."""
    columns = channel._kernels.SYMM_FLAG_COLUMNS
    channel._buffer.flags[:, : columns - 1] = -5  # the last column says whether the team has failed


def call(channel: SymmChannel, op: str, x: Tensor, root: int) -> Tensor:
    """One collective of this rank's input; what it holds afterwards."""
    world = channel._buffer.size
    if op == "gather":
        out = torch.full((world * len(x),), torch.nan, dtype=x.dtype)
        channel.all_gather(out, x)
    elif op == "scatter":
        out = torch.full((len(x) // world,), torch.nan, dtype=x.dtype)
        channel.reduce_scatter(out, x)
    elif op == "broadcast":
        out = x.clone()
        channel.broadcast(out, root)
    else:
        out = x.clone()
        channel.all_reduce(out, kind=op)
    return out


def every_collective(rank: int, world: int, library) -> None:
    channel = open_channel(library, world)
    start_near_the_wrap(channel)
    dist.barrier(mesh_for(Sizes(tp=world)).tp.pg)  # all have set them, and none has been in a step
    delays = random.Random(rank)
    for dtype, num in ((torch.float32, 1003), (torch.bfloat16, 777), (torch.float16, 16)):
        for op in ("one_shot", "two_shot", "scatter", "gather", "broadcast"):
            x = make_inputs(op, ranks=world, num=num, calls=6, dtype=dtype)
            right = expected(op, x)
            for index in range(len(x)):
                time.sleep(delays.random() * 1e-3)
                found = call(channel, op, x[index, rank].contiguous(), root=index % world)
                assert torch.equal(found.view(torch.uint8), right[index, rank].contiguous().view(torch.uint8)), (
                    op,
                    dtype,
                )
    channel.synchronize()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_collective_to_the_bit(library, world):
    run_ranks(world, every_collective, library)


def extremes(rank: int, world: int, library) -> None:
    channel = open_channel(library, world, jitter_us=0)
    x = make_inputs("one_shot", ranks=world, num=300, calls=1, dtype=torch.float32)[0]
    x[1, 7] = torch.nan
    for op, right in (("max", x.amax(0)), ("min", x.amin(0))):
        found = x[rank].clone()
        channel.all_reduce(found, op)
        torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)
    own = torch.full((world, 40), torch.nan)
    own[rank] = x[rank, :40]
    channel.all_gather(own, own[rank])  # the shard lies in its place
    torch.testing.assert_close(own, x[:, :40], rtol=0, atol=0, equal_nan=True)


def test_max_min_and_in_place(library):
    run_ranks(2, extremes, library)


def one_missing(rank: int, world: int, library) -> str:
    channel = open_channel(library, world, timeout_s=0.4, jitter_us=0)
    channel.barrier()
    if rank == 1:
        time.sleep(1.5)  # its memory stays mapped
        return ""
    x = torch.ones(2000)
    channel.all_reduce(x)
    assert x.isnan().all()  # nothing that looks like a result
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 did not come to a collective within 0.4 s") as caught:
        channel.all_reduce(x)
    assert time.monotonic() - began < 0.3  # it fails at once
    return str(caught.value)


def test_a_missing_rank_is_an_error_with_its_number(library):
    message = run_ranks(2, one_missing, library)[0]
    assert "of rank 0 waited for its step 1, it has reported 0" in message


def test_what_it_takes():
    def kernels_team(**fields):
        return fields

    kernels = type("Kernels", (), {"SYMM_FLAG_COLUMNS": 38, "symm_team": staticmethod(kernels_team)})
    heap = virtual_heaps(2, device="cpu")[0]
    channel = SymmChannel(heap, ranks=(4, 6), timeout_s=1.0, buffer_bytes=1024, kernels=kernels)
    assert all(channel.takes(torch.zeros(2, dtype=dtype)) for dtype in FORMATS)
    assert not channel.takes(torch.zeros(2, dtype=torch.float64))
    assert not channel.takes(torch.zeros(4, 4).t()[:2])
    assert channel.kind(2**30, "sum") == "one_shot"  # on two ranks a second trip saves nothing


def test_kinds_by_size():
    assert [round(one_shot_limit(size) / 1024) for size in (4, 8)] == [977, 279]
    kernels = type("Kernels", (), {"SYMM_FLAG_COLUMNS": 38, "symm_team": staticmethod(lambda **fields: fields)})
    channel = SymmChannel(
        virtual_heaps(8, device="cpu")[0], ranks=tuple(range(8)), timeout_s=1.0, buffer_bytes=1024, kernels=kernels
    )
    assert channel.kind(256 * 1024, "sum") == "one_shot"
    assert channel.kind(512 * 1024, "sum") == "two_shot"
    channel._multimem = True
    assert channel.kind(512 * 1024, "sum") == "multimem"
    assert channel.kind(512 * 1024, "max") == "two_shot"


def test_why_not_here():
    assert symm_channel_missing(CPU) == "our collectives between GPUs are CUDA kernels, this rank is on cpu"
    with pytest.raises(ValueError, match="up to 16 ranks, the group has 17"):
        SymmChannel(virtual_heaps(17, device="cpu")[0], ranks=tuple(range(17)), timeout_s=1.0)
