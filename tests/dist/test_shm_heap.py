"""The shared memory heap between processes: values through peers' tensors, flags, barrier, and nothing left behind."""

import os
import random
import time
from unittest import mock

import pytest
import torch

from megalite import native
from megalite.comm import segment
from megalite.comm.segment import SHM_DIR
from megalite.comm.symmetric import open_heap
from megalite.mesh import Sizes
from tests.dist.pool import mesh_for, run_ranks

pytestmark = pytest.mark.skipif(native.load() is None, reason="needs the compiled extension")
CPU = torch.device("cpu")
READY, DONE = 0, 1


def names() -> list[str]:
    """Segments of this rank that still have a name."""
    return [path.name for path in SHM_DIR.glob(f"megalite-*-{os.getpid()}-*")]


def ring_of_sums(rank: int, world: int) -> None:
    """Each call, every rank pulls all peers' buffers; two buffers, READY and DONE flags, random delays."""
    heap = open_heap(mesh_for(Sizes(tp=world)).tp, device=CPU, timeout_s=30.0)
    buffer, lib, rng = heap.allocate((1000,), torch.float32), native.load(), random.Random(rank)
    assert buffer.pointers.shape == (2, world)

    def post(column: int, value: int) -> None:
        for flags in buffer.peer_flags:
            lib.flag_store(flags[rank, column].data_ptr(), value)

    def wait(column: int, value: int) -> None:
        for source in range(world):
            assert lib.flag_wait(buffer.flags[source, column].data_ptr(), value, 30.0)

    for call in range(40):
        epoch, i = call + 1, call % 2
        wait(DONE, epoch - 2)
        buffer.local[i].fill_(rank + 10.0 * call)
        post(READY, epoch)
        wait(READY, epoch)
        time.sleep(rng.choice([0.0, 0.0, 0.002]))
        total = torch.stack(buffer.peers[i]).sum(0)
        assert total.unique().tolist() == [sum(r + 10.0 * call for r in range(world))]
        post(DONE, epoch)
    heap.barrier()
    assert names() == []


@pytest.mark.parametrize("world", [2, 4])
def test_a_protocol_over_the_heap(world):
    run_ranks(world, ring_of_sums)


def barrier_without_one(rank: int, world: int) -> str:
    heap = open_heap(mesh_for(Sizes(tp=world)).tp, device=CPU, timeout_s=0.3)
    heap.barrier()
    if rank == 1:
        return ""
    with pytest.raises(RuntimeError) as caught:
        heap.barrier()
    return str(caught.value)


def test_a_barrier_that_one_rank_does_not_reach():
    said = run_ranks(3, barrier_without_one)
    assert said[0] == said[2] == "ranks 1 did not come to a barrier of the tp heap within 0.3 s"


def too_large(rank: int, world: int) -> str:
    heap = open_heap(mesh_for(Sizes(tp=world)).tp, device=CPU, timeout_s=30.0)
    with mock.patch.object(segment, "free_bytes", return_value=1 << 20), pytest.raises(RuntimeError) as caught:
        heap.allocate((1 << 20,), torch.uint8)
    heap.allocate((5,), torch.uint8)
    assert names() == []
    return str(caught.value)


def test_no_space_is_an_error_on_every_rank_and_leaves_nothing():
    said = run_ranks(2, too_large)
    assert said[0] == said[1]
    assert "no shared memory on rank 0 of 2: No space left on device (/dev/shm, " in said[0]
