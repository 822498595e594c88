"""The shared memory channel's reduce_scatter in two halves, with threads for ranks: bits, what the first half waits for
(nothing), and how it fails."""

import signal
import time
import weakref

import pytest
import torch
from torch import Tensor

from megalite import native
from tests.unit.test_shm_channel import COUNTS, DTYPES, GONE, SLOT, Team, data, in_rank_order, messages

pytestmark = pytest.mark.skipif(native.load() is None, reason="needs the compiled extension")
FLOATS = SLOT // 2 // 4
"""In one chunk of a reduce_scatter between two ranks, for each."""


def begin(team: Team, rank: int, full: Tensor):
    """The first half on the calling thread; the result's tensor and the second half."""
    out = torch.full((full.numel() // len(team.channels),), 77).to(full.dtype)
    return out, team.channels[rank].begin_reduce_scatter(out, full)


def published(team: Team, rank: int) -> int:
    """Chunks so far, by the rank's `ready` flag: see csrc/include/shm_layout.h."""
    flag = team.segment[-team.segment.data_ptr() % 128 :][1152 + 640 * rank :][:4].view(torch.int32).item()
    return (flag - team.tuning.first_chunk) % 2**32


def scatter(team: Team, full: list[Tensor], in_halves) -> Tensor:
    """One reduce_scatter, in halves on the ranks that `in_halves` says yes to; the ranks' pieces."""
    outs = [torch.empty(one.numel() // len(full), dtype=one.dtype) for one in full]

    def work(channel, rank: int) -> None:
        if in_halves(rank):
            channel.begin_reduce_scatter(outs[rank], full[rank])()
        else:
            channel.reduce_scatter(outs[rank], full[rank])

    assert team.run(work) == [None] * len(full)
    return torch.cat(outs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_same_bits_as_in_one_call(world, dtype):
    """Also where some ranks make one call of it."""
    team = Team(world)
    for count in COUNTS:
        full = [data(r, count * world, dtype) for r in range(world)]
        whole = scatter(team, full, lambda r: False)
        assert torch.equal(whole, in_rank_order(full)), count
        for which in (lambda r: True, lambda r: r == 1, lambda r: r != 1):
            assert torch.equal(scatter(team, full, which), whole), count


@pytest.mark.parametrize("first_chunk", [2**31 - 5, 2**32 - 5])
def test_counters_wrap(first_chunk):
    team = Team(3, first_chunk=first_chunk)
    for count in (64, 128, 0, 5003, 1):
        full = [data(r, 3 * count, torch.float32) for r in range(3)]
        assert torch.equal(scatter(team, full, lambda r: True), in_rank_order(full))


def test_results_in_place():
    full = [data(r, 3 * 700, torch.float32) for r in range(3)]
    total, team = in_rank_order(full), Team(3)
    pieces = [one.view(3, -1)[r] for r, one in enumerate(full)]
    assert team.run(lambda c, r: c.begin_reduce_scatter(pieces[r], full[r])()) == [None] * 3
    assert torch.equal(torch.cat(pieces), total)


@pytest.mark.parametrize("chunks", [0, 1, 2])
def test_who_has_published_all_of_it_lets_the_others_go_on(chunks):
    """All ranks on one thread: nobody can wait for anybody."""
    team = Team(2, timeout_s=5.0)
    full = [data(r, 2 * chunks * FLOATS, torch.float32) for r in range(2)]
    first, finish = begin(team, 0, full[0])
    assert published(team, 0) == max(chunks, 1)
    second = torch.empty_like(first)
    team.channels[1].reduce_scatter(second, full[1])
    assert first.eq(77).all()
    finish()
    assert torch.equal(torch.cat([first, second]), in_rank_order(full))


def test_a_long_one_is_published_as_far_as_it_fits():
    team = Team(2)
    full = [data(r, 10 * FLOATS, torch.float32) for r in range(2)]
    first, finish = begin(team, 0, full[0])
    assert published(team, 0) == 2
    second = torch.empty_like(first)
    other = team.pool.submit(team.channels[1].reduce_scatter, second, full[1])
    finish()
    other.result(30)
    assert torch.equal(torch.cat([first, second]), in_rank_order(full))


@pytest.mark.parametrize("first_chunk", [0, 2**31 - 1, 2**32 - 1])
@pytest.mark.parametrize(("before", "free"), [(1, 1), (2, 0)])
def test_slots_that_are_not_free_are_left_to_the_second_half(before, free, first_chunk):
    """Rank 0 is through with a call whose chunks rank 1 has not taken, when it begins the next."""
    team = Team(2, timeout_s=5.0, first_chunk=first_chunk)
    old = [data(r, 2 * before * FLOATS, torch.float32) for r in range(2)]
    new = [data(r + 5, 6 * FLOATS, torch.float32) for r in range(2)]
    outs = [torch.empty(before * FLOATS), torch.empty(0)]
    outs[1], finish_old = begin(team, 1, old[1])
    team.channels[0].reduce_scatter(outs[0], old[0])
    began = time.monotonic()
    first, finish = begin(team, 0, new[0])
    assert time.monotonic() - began < 1.0
    assert published(team, 0) == before + free
    finish_old()
    assert torch.equal(torch.cat(outs), in_rank_order(old))
    second = torch.empty_like(first)
    other = team.pool.submit(team.channels[1].reduce_scatter, second, new[1])
    finish()
    other.result(30)
    assert torch.equal(torch.cat([first, second]), in_rank_order(new))


def test_both_tensors_live_until_the_second_half():
    team = Team(2)
    out, full = torch.empty(3), torch.ones(6)
    kept = [weakref.ref(out), weakref.ref(full)]
    finish = team.channels[0].begin_reduce_scatter(out, full)
    del out, full
    assert all(one() is not None for one in kept)
    team.channels[1].reduce_scatter(torch.empty(3), torch.ones(6))
    finish()
    assert kept[0]().tolist() == [2.0] * 3
    del finish
    assert all(one() is None for one in kept)


BETWEEN = {
    "all_reduce (sum) of 5 x float32": lambda c: c.all_reduce(torch.zeros(5), "sum"),
    "all_reduce (sum) of 5000 x float32": lambda c: c.all_reduce(torch.zeros(5000), "sum"),
    "reduce_scatter of 6 x float32": lambda c: c.begin_reduce_scatter(torch.zeros(2), torch.zeros(6)),
    "all_gather of 2 x float32": lambda c: c.all_gather(torch.zeros(6), torch.zeros(2)),
    "broadcast from rank 4 of 2 x float32": lambda c: c.broadcast(torch.zeros(2)),
    "barrier": lambda c: c.barrier(),
}


@pytest.mark.parametrize("what", BETWEEN)
def test_a_call_in_between_is_refused_and_all_ranks_are_told(what):
    """As after an exception between the halves, if its rank makes another call at all."""
    team = Team(3)
    waiting = team.pool.submit(team.channels[2].reduce_scatter, torch.empty(500), torch.zeros(1500))
    _, finish = begin(team, 0, torch.zeros(1500))
    began = time.monotonic()
    (text,) = messages([team.pool.submit(BETWEEN[what], team.channels[0]).exception(10)])
    assert text == f"rank 4 calls {what} over ranks 4, 7, 9 before it has waited for its last reduce_scatter"
    others = [team.pool.submit(finish), team.pool.submit(team.channels[1].barrier), waiting]
    usual = "reduce_scatter of 1500 x float32"
    said = messages([one.exception(10) for one in others])
    for rank, call, other in zip((4, 7, 9), (usual, "barrier", usual), said, strict=True):
        assert other == f"rank {rank} can't do {call} over ranks 4, 7, 9: the ranks are out of step since: {text}"
    assert time.monotonic() - began < 2.0


def test_a_second_half_is_made_once():
    team = Team(2)
    _, finish = begin(team, 0, torch.zeros(4))
    team.channels[1].reduce_scatter(torch.empty(2), torch.zeros(4))
    finish()
    with pytest.raises(RuntimeError, match="no reduce_scatter has begun"):
        finish()
    with pytest.raises(RuntimeError, match="out of step since: rank 4 was interrupted"):
        team.channels[1].barrier()


def test_another_call_of_a_peer_is_a_mismatch():
    team = Team(2)
    _, finish = begin(team, 0, torch.zeros(64))
    other = team.pool.submit(team.channels[1].all_reduce, torch.zeros(64), "sum")
    said = messages([team.pool.submit(finish).exception(10), other.exception(10)])
    assert any("but rank" in text and "calls something else there" in text for text in said), said


@pytest.mark.parametrize("chunks", [1, 5])
def test_a_peer_that_dies_is_named_by_the_second_half(chunks):
    team, began = Team(2, dead=GONE, timeout_s=500.0), time.monotonic()
    _, finish = begin(team, 0, torch.zeros(2 * chunks * FLOATS))
    (text,) = messages([team.pool.submit(finish).exception(10)])
    assert time.monotonic() - began < 5
    what = f"reduce_scatter of {2 * chunks * FLOATS} x float32 over ranks 4, 7"
    assert text == f"rank 7 died (pid {GONE.pid}); rank 4 waited for it in {what}"


def test_a_peer_that_does_not_come_is_named_by_the_second_half():
    team = Team(2, timeout_s=0.3)
    _, finish = begin(team, 0, torch.zeros(4))
    (text,) = messages([team.pool.submit(finish).exception(10)])
    what = "reduce_scatter of 4 x float32 over ranks 4, 7"
    assert text == f"rank 7 did not come within 0.3 s (run.timeout_s); rank 4 waited in {what}"


def test_a_rank_that_stays_between_the_halves_is_named_and_told():
    team, full = Team(2, timeout_s=0.3), torch.zeros(6 * FLOATS)
    _, finish = begin(team, 0, full)
    (text,) = messages([team.pool.submit(team.channels[1].reduce_scatter, torch.empty(3 * FLOATS), full).exception(10)])
    what = f"reduce_scatter of {6 * FLOATS} x float32 over ranks 4, 7"
    assert text == f"rank 4 did not come within 0.3 s (run.timeout_s); rank 7 waited in {what}"
    with pytest.raises(RuntimeError) as error:
        finish()
    assert str(error.value) == f"rank 4 can't do {what}: the ranks are out of step since: {text}"


def test_a_failure_is_told_by_a_second_half_that_need_not_wait():
    team, full = Team(2), torch.zeros(4)
    _, finish = begin(team, 0, full)
    team.channels[1].reduce_scatter(torch.empty(2), full)
    team.channels[1]._lib.fail("the reason")
    with pytest.raises(RuntimeError, match="out of step since: the reason"):
        finish()


def test_a_signal_ends_the_second_half_and_the_channel():
    team = Team(2)

    def stop(number, frame):
        raise KeyboardInterrupt

    _, finish = begin(team, 0, torch.zeros(4))
    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            finish()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(RuntimeError, match=r"since: rank 4 was interrupted \(KeyboardInterrupt\) in reduce_scatter"):
        team.channels[1].barrier()
