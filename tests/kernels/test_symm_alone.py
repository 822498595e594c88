"""The kernels of `symm` on one rank whose peers never come: waits end, nothing that looks right is returned."""

import pytest
import torch

from megalite.comm.symmetric import virtual_heaps
from megalite.kernels.gather_gemm import triton_impl as gather
from megalite.kernels.gemm_all_reduce import triton_impl as all_reduce
from megalite.kernels.gemm_scatter import triton_impl as scatter
from megalite.kernels.signals import DONE, READY, Peers
from megalite.kernels.signals import triton_impl as signals
from tests.kernels.triton_tools import CPU

ROWS, N, K = 6, 5, 7


def make_peers(shape) -> tuple:
    """Rank 0's buffer of a heap of two, and what its kernels are told."""
    heaps = virtual_heaps(2, device=CPU)
    buffer = heaps[0].allocate(shape, torch.float32)

    def zeros(num):
        return torch.zeros(num, dtype=torch.int32)

    return buffer, Peers(0, 2, buffer.flags, buffer.flag_pointers, buffer.epoch, zeros(3), zeros(6), zeros(2), limit=20)


def run(op: str) -> tuple:
    """(result, errors) of a call without its peer."""
    x, weight = torch.ones(ROWS, K), torch.ones(N, K)
    if op == "gather":
        buffer, peers = make_peers((2 * ROWS, K))
        signals.begin(peers, 0)
        return gather.forward(x, buffer.local[0], weight, None, peers=peers), peers.errors
    shape, kernels = ((ROWS, N), scatter) if op == "scatter" else ((2, ROWS, N), all_reduce)
    buffer, peers = make_peers(shape)
    signals.begin(peers, 0)
    staging, pointers = torch.zeros(1, ROWS // 2, N), buffer.pointers[0]
    y = kernels.forward(x, weight, None, buffer=buffer.local[0], staging=staging, pointers=pointers, peers=peers)
    return y, peers.errors


@pytest.mark.timeout(60)
@pytest.mark.parametrize("op", ["gather", "scatter", "all_reduce"])
def test_what_did_not_come_is_nan(op):
    result, errors = run(op)
    assert errors.tolist() == [1, 0, 1, READY, 1, 0]
    missing = result[ROWS:] if op == "gather" else result
    assert missing.isnan().all()
    if op == "gather":
        assert (result[:ROWS] == K).all(), "own rows come first"


@pytest.mark.timeout(60)
def test_begin_gives_up_on_a_peer_that_still_reads():
    """Whatever the flags say then, the call's results are NaN."""
    buffer, peers = make_peers((2 * ROWS, K))
    peers.used.fill_(4)
    peers.epoch.fill_(5)
    signals.begin(peers, 0)
    assert peers.errors.tolist() == [1, 0, 1, DONE, 4, 0]
    assert (peers.epoch.item(), peers.used.tolist()) == (6, [6, 4])
    buffer.flags.fill_(6)
    assert gather.forward(torch.ones(ROWS, K), buffer.local[0], torch.ones(N, K), None, peers=peers).isnan().all()
