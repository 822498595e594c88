"""The symmetric heap in one process: layout, sharing between virtual ranks, wrong uses, a fake of torch's module."""

import itertools
import threading
from types import SimpleNamespace

import pytest
import torch

from megalite import native
from megalite.comm import heap_torch, heap_virtual
from megalite.comm.heap_layout import ALIGNMENT, Piece
from megalite.comm.symmetric import open_heap, symmetric_missing, virtual_heaps
from megalite.mesh import Group

CPU = torch.device("cpu")


@pytest.fixture
def lib():
    """The extension."""
    if native.load() is None:
        pytest.skip(f"not built: {native.why_missing()}")
    return native.load()


def test_ranks_see_each_others_buffers_and_flags():
    heaps = virtual_heaps(3, device="cpu")
    buffers = [heap.allocate((5, 3), torch.float32, num_buffers=3, num_flags=16) for heap in heaps]
    for rank, buffer in enumerate(buffers):
        assert (buffer.rank, buffer.size, len(buffer.local)) == (rank, 3, 3)
        assert buffer.pointers.shape == (3, 3)
        assert buffer.flags.shape == (3, 16)
        assert buffer.flags.is_contiguous()
        assert not buffer.flags[rank:].any()  # rows of the ranks that did not write yet
        assert not torch.stack(buffer.local).any()
        for i in range(3):
            buffer.local[i].fill_(10 * rank + i)
            buffer.peer_flags[i][rank, 7] = 100 * i + rank  # rank i's row of this writer
    for rank, buffer in enumerate(buffers):
        assert buffer.flags[:, 7].tolist() == [100 * rank + s for s in range(3)]
        assert buffer.flag_pointers.tolist() == [other.flags.data_ptr() for other in buffers]
        for i in range(3):
            assert [t.unique().item() for t in buffer.peers[i]] == [10.0 * r + i for r in range(3)]
            assert buffer.pointers[i].tolist() == [other.local[i].data_ptr() for other in buffers]
            assert all(address % 64 == 0 for address in buffer.pointers[i].tolist())


def test_pieces_do_not_overlap_whatever_the_sizes():
    for shape, dtype, num_flags in (((0,), torch.uint8, 1), ((7,), torch.int8, 3), ((3, 33), torch.float64, 64)):
        piece = Piece(shape, dtype, 2, num_flags, 3)
        block = torch.zeros(piece.num_bytes, dtype=torch.uint8)
        views = [piece.buffer(block, 0), piece.buffer(block, 1), piece.flags(block)]
        assert [tuple(v.shape) for v in views] == [shape, shape, (3, num_flags)]
        spans = [(v.data_ptr() - block.data_ptr(), v.data_ptr() - block.data_ptr() + v.nbytes) for v in views]
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
        assert spans[-1][1] <= piece.num_bytes
        assert piece.num_bytes % ALIGNMENT == 0


def test_wrong_allocations_are_refused():
    first, second = virtual_heaps(2, device="cpu")
    first.allocate((4,), torch.float32)
    with pytest.raises(ValueError, match="make them alike"):
        second.allocate((5,), torch.float32)
    with pytest.raises(ValueError, match="use at least 2"):
        first.allocate((4,), torch.float32, num_buffers=1)
    with pytest.raises(ValueError, match="num_flags=0"):
        first.allocate((4,), torch.float32, num_flags=0)


def test_the_virtual_barrier_waits_for_all_and_gives_up(monkeypatch):
    heaps, order = virtual_heaps(2, device="cpu"), []
    thread = threading.Thread(target=lambda: (heaps[1].barrier(), order.append("through")))
    thread.start()
    thread.join(0.05)
    assert order == []
    heaps[0].barrier()
    thread.join(10)
    assert order == ["through"]
    monkeypatch.setattr(heap_virtual, "BARRIER_LIMIT_S", 0.05)
    with pytest.raises(RuntimeError, match="not all 2 virtual ranks"):
        heaps[0].barrier()


def test_flags_compare_past_the_wrap(lib):
    flag = torch.zeros(1, dtype=torch.int32)
    for value, wanted, reached in (
        (5, 5, True),
        (5, 6, False),
        (-(2**31), 2**31 - 1, True),
        (2**31 - 1, -(2**31), False),
    ):
        lib.flag_store(flag.data_ptr(), value)
        assert lib.flag_load(flag.data_ptr()) == flag.item() == value
        assert lib.flag_wait(flag.data_ptr(), wanted, 0.01) is reached


def test_a_wait_sees_a_later_store_and_lets_other_threads_run(lib):
    flag = torch.zeros(1, dtype=torch.int32)
    timer = threading.Timer(0.05, lambda: lib.flag_store(flag.data_ptr(), 3))
    timer.start()
    assert lib.flag_wait(flag.data_ptr(), 3, 20.0)
    timer.join()


def test_a_heap_that_is_not_possible_says_why():
    alone = Group("tp")
    with pytest.raises(ValueError, match="kind torch on cpu is not possible: torch's symmetric memory is for GPUs"):
        open_heap(alone, backend="torch", device=CPU, timeout_s=1.0)
    with pytest.raises(ValueError, match="kind shm on cuda is not possible: shared memory is for CPU ranks"):
        open_heap(alone, backend="shm", device=torch.device("cuda"), timeout_s=1.0)


def test_a_heap_of_one_rank(lib):
    heap = open_heap(Group("tp"), device=CPU, timeout_s=1.0)
    buffer = heap.allocate((2, 2), torch.bfloat16)
    heap.barrier()
    assert buffer.peers[1][0] is buffer.local[1]
    heap.close()


def test_this_torch_has_what_the_torch_heap_uses():
    assert heap_torch._missing_names(heap_torch._symm_mem()) is None
    assert "torch's symmetric memory is for GPUs" in symmetric_missing(CPU)


def test_a_torch_without_a_function_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    module = SimpleNamespace(empty=torch.empty)
    assert symmetric_missing(torch.device("cuda"), module).endswith("_symmetric_memory.rendezvous")
    module.rendezvous = lambda tensor, group: None
    assert symmetric_missing(torch.device("cuda"), module) is None


class FakeHandle:
    """Two ranks' memory in one arena each; this rank's allocation begins at byte `offset`."""

    offset = 512

    def __init__(self, own):
        self.arenas = [None, torch.zeros(FakeHandle.offset + own.numel() + 64, dtype=torch.uint8)]

    def get_buffer(self, rank, sizes, dtype, storage_offset=0):
        return self.arenas[rank][storage_offset : storage_offset + sizes[0]].view(dtype)


def test_the_torch_heap_reads_peers_at_their_offset(monkeypatch):
    monkeypatch.setattr(heap_torch.TorchHeap, "barrier", lambda self: None)
    handles = []

    def rendezvous(tensor, group):
        handles.append(FakeHandle(tensor))
        return handles[-1]

    module = SimpleNamespace(empty=torch.empty, rendezvous=rendezvous)
    group = Group("tp", (4, 5), 0)
    heap = heap_torch.TorchHeap(group, device=CPU, timeout_s=1.0, module=module)
    buffer = heap.allocate((6,), torch.float32)
    assert not buffer.local[0].any()
    buffer.peers[0][1].fill_(2.5)
    seen = handles[0].arenas[1][FakeHandle.offset :][: 6 * 4].view(torch.float32)
    assert seen.tolist() == [2.5] * 6

    def unreachable(tensor, group):
        raise RuntimeError("no peer access")

    module.rendezvous = unreachable
    with pytest.raises(RuntimeError, match="no symmetric memory over the tp ranks: no peer access"):
        heap.allocate((6,), torch.float32)
