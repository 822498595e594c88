"""The shared memory channel with threads for ranks: values, bits, sizes, wrapping counters, and how calls fail."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from megalite import native
from megalite.comm.segment import Process, process_of, this_process
from megalite.comm.shm import ELEMENTS, ShmChannel, Tuning, segment_bytes

pytestmark = pytest.mark.skipif(native.load() is None, reason="needs the compiled extension")
SLOT = 1024
SMALL = {"slot_bytes": SLOT, "one_shot_max": 2 * SLOT, "spins": 10, "yields": 2}
COUNTS = [0, 1, 3, 64, 129, 255, 256, 257, 1000, 5003]
DTYPES = list(ELEMENTS)
GONE = Process(2**22 + 1, 5)
"""A pid that Linux never gives."""
RANKS = (4, 7, 9, 11)
"""Global ranks, so that messages can't be right by chance."""


class Team:
    """Channels of some ranks on one segment, each driven by its own thread."""

    def __init__(self, world: int, *, dead: Process | None = None, **tuning):
        self.tuning = Tuning(**(SMALL | {"timeout_s": 30.0} | tuning))
        self.segment = torch.zeros(segment_bytes(world, self.tuning) + 128, dtype=torch.uint8)
        start = -self.segment.data_ptr() % 128
        processes = [dead if dead and r == 1 else this_process() for r in range(world)]
        self.ranks = RANKS[:world]
        self.channels = [
            ShmChannel(self.segment[start:], r, ranks=self.ranks, processes=processes, tuning=self.tuning)
            for r in range(world)
        ]
        self.pool = ThreadPoolExecutor(world)

    def run(self, work) -> list:
        """work(channel, rank) on every rank's thread; results, or what was raised, in rank order."""
        waiting = [self.pool.submit(work, channel, r) for r, channel in enumerate(self.channels)]
        return [one.exception(60) or one.result() for one in waiting]


def data(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Numbers whose sums round differently in another order."""
    generator = torch.Generator().manual_seed(1000 * rank + count)
    if dtype.is_floating_point:
        return (torch.randn(count, generator=generator) * 8.0 ** (rank % 3)).to(dtype)
    return torch.randint(-(2**28), 2**28, (count,), generator=generator, dtype=dtype)


def in_rank_order(tensors: list[Tensor]) -> Tensor:
    """The sum, two-byte floats in fp32 with one rounding."""
    wide = torch.float32 if tensors[0].dtype in (torch.bfloat16, torch.float16) else tensors[0].dtype
    total = tensors[0].to(wide)
    for tensor in tensors[1:]:
        total = total + tensor.to(wide)
    return total.to(tensors[0].dtype)


def all_collectives(team: Team, count: int, dtype: torch.dtype) -> None:
    """Each collective once, against torch."""
    world = len(team.channels)
    tensors = [data(r, count * world, dtype) for r in range(world)]
    total = in_rank_order(tensors)
    stack = torch.stack(tensors)
    for op, expected in (("sum", total), ("max", stack.amax(0)), ("min", stack.amin(0))):
        mine = [tensor.clone() for tensor in tensors]
        assert team.run(lambda c, r, mine=mine, op=op: c.all_reduce(mine[r], op)) == [None] * world
        assert all(torch.equal(one, expected) for one in mine), (op, count)
    outs = [torch.empty(count, dtype=dtype) for _ in tensors]
    assert team.run(lambda c, r: c.reduce_scatter(outs[r], tensors[r])) == [None] * world
    assert torch.equal(torch.cat(outs), total)
    gathered = [torch.empty(count * world, dtype=dtype) for _ in tensors]
    assert team.run(lambda c, r: c.all_gather(gathered[r], outs[r])) == [None] * world
    assert all(torch.equal(one, total) for one in gathered)
    mine = [tensor.clone() for tensor in tensors]
    assert team.run(lambda c, r: c.broadcast(mine[r], world - 1)) == [None] * world
    assert all(torch.equal(one, tensors[-1]) for one in mine)
    assert team.run(lambda c, r: c.barrier()) == [None] * world


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_size_from_none_to_many_chunks(world, dtype):
    team = Team(world)
    for count in COUNTS:
        all_collectives(team, count, dtype)


def test_one_shot_and_two_shot_give_the_same_bits():
    tensors = [data(r, 3001, torch.bfloat16) for r in range(3)]
    found = []
    for one_shot_max in (0, 1 << 30):
        mine = [tensor.clone() for tensor in tensors]
        Team(3, one_shot_max=one_shot_max).run(lambda c, r, mine=mine: c.all_reduce(mine[r], "sum"))
        found += mine
    assert all(torch.equal(one, found[0]) for one in found)


def test_results_in_place():
    team = Team(3)
    full = [data(r, 3 * 700, torch.float32) for r in range(3)]
    total = in_rank_order(full)
    pieces = [full[r][700 * r : 700 * (r + 1)] for r in range(3)]
    assert team.run(lambda c, r: c.reduce_scatter(pieces[r], full[r])) == [None] * 3
    assert torch.equal(torch.cat(pieces), total)
    assert team.run(lambda c, r: c.all_gather(full[r], pieces[r])) == [None] * 3
    assert all(torch.equal(one, total) for one in full)


def test_unaligned_tensors():
    team = Team(2)
    whole = [data(r, 1203, torch.float16) for r in range(2)]
    mine = [tensor[1:].clone() for tensor in whole]
    views = [torch.empty(1203, dtype=torch.float16)[1:].copy_(tensor) for tensor in mine]
    assert team.run(lambda c, r: c.all_reduce(views[r], "sum")) == [None] * 2
    assert torch.equal(views[0], in_rank_order(mine))
    assert torch.equal(views[1], views[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_nan_infinity_zero_and_subnormals(dtype):
    inf, nan, tiny = float("inf"), float("nan"), torch.finfo(dtype).smallest_normal
    pairs = [(inf, 1.0), (inf, -inf), (nan, 1.0), (1.0, nan), (-0.0, -0.0), (tiny, -tiny / 4), (tiny / 8, tiny / 8)]
    pairs += [(torch.finfo(dtype).max, torch.finfo(dtype).max), (-inf, -inf), (nan, nan), (1.0, tiny)]
    both = [torch.tensor(column, dtype=dtype).repeat(7) for column in zip(*pairs, strict=True)]
    for op, expected in (
        ("sum", in_rank_order(both)),
        ("max", torch.maximum(*both)),
        ("min", torch.minimum(*both)),
    ):
        mine = [tensor.clone() for tensor in both]
        Team(2).run(lambda c, r, mine=mine, op=op: c.all_reduce(mine[r], op))
        for one in mine:
            torch.testing.assert_close(one, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_vector_levels_give_the_same_bits(dtype):
    """Against the scalar level, with every fp16 or bf16 pattern where there are so few."""
    lib = native.load()
    if dtype in (torch.float16, torch.bfloat16):
        patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
        sources = [patterns, patterns.flip(0).roll(77)]
    else:
        sources = [data(r, 4099, dtype) for r in range(2)]
    process, slot = this_process(), 1 << 14
    found = []
    for simd in range(lib.simd_level() + 1):
        for op in range(3):
            segment = torch.zeros(lib.shm_segment_bytes(2, slot) + 128, dtype=torch.uint8)
            address = segment.data_ptr() + -segment.data_ptr() % 128
            mine = [source.clone() for source in sources]
            channels = [
                lib.ShmChannel(address, r, [(process.pid, process.start)] * 2, slot, 0, (10, 2, 30.0), 0, simd)
                for r in range(2)
            ]
            with ThreadPoolExecutor(2) as pool:
                args = [(c, m.data_ptr(), m.numel(), ELEMENTS[dtype], op) for c, m in zip(channels, mine, strict=True)]
                ends = list(pool.map(lambda a: a[0].all_reduce(*a[1:]), args))
            assert ends == [(0, []), (0, [])]
            found.append((op, mine[0]))
    for op, tensor in found:
        expected = found[op][1]
        assert torch.equal(tensor.isnan(), expected.isnan())
        same = tensor.view(torch.uint8) == expected.view(torch.uint8)
        assert (same.view(tensor.numel(), -1).all(1) | tensor.isnan()).all()


@pytest.mark.parametrize("first_chunk", [2**31 - 9, 2**32 - 9])
def test_counters_wrap(first_chunk):
    team = Team(3, first_chunk=first_chunk)
    for count in (5, 5003, 0, 700):
        all_collectives(team, count, torch.float32)


def test_the_same_bits_again_and_again_under_random_delays():
    team, tensors = Team(4), [data(r, 2000, torch.float32) for r in range(4)]
    expected = in_rank_order(tensors)
    delays = torch.rand(30, 4, generator=torch.Generator().manual_seed(1))

    def work(channel: ShmChannel, rank: int) -> None:
        for i in range(30):
            if delays[i, rank] < 0.3:
                time.sleep(delays[i, rank].item() / 100)
            mine = tensors[rank].clone()
            channel.all_reduce(mine, "sum")
            assert torch.equal(mine, expected), i

    assert team.run(work) == [None] * 4


def test_two_groups_interleaved():
    """Ranks of a square: rows and columns have their own channels."""
    rows, columns = [Team(2), Team(2)], [Team(2), Team(2)]

    def work(channel: ShmChannel, rank: int, row: int) -> None:
        other = columns[rank].channels[row]
        for i in range(50):
            x = torch.full((300,), float(2 * row + rank + i))
            channel.all_reduce(x, "sum")
            other.all_reduce(x, "sum")
            assert x.unique().tolist() == [6.0 + 4 * i]

    waiting = [t.pool.submit(work, c, r, row) for row, t in enumerate(rows) for r, c in enumerate(t.channels)]
    assert [one.exception(30) for one in waiting] == [None] * 4


def test_takes_what_lies_in_one_piece():
    channel = Team(2).channels[0]
    x = torch.zeros(4, 6)
    assert channel.takes(x)
    assert channel.takes(x[1:3])
    assert not channel.takes(x.t())
    assert not channel.takes(x[:, :3])
    assert not channel.takes(x.bool())
    assert not channel.takes(x.to("meta"))


def messages(raised: list) -> list[str]:
    assert all(isinstance(one, RuntimeError) for one in raised), raised
    return [str(one) for one in raised]


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (lambda c: c.all_reduce(torch.zeros(70), "sum"), "all_reduce (sum) of 70 x float32 over ranks 4, 7, 9"),
        (lambda c: c.all_reduce(torch.zeros(64), "max"), "all_reduce (max) of 64 x float32 over ranks 4, 7, 9"),
        (lambda c: c.all_reduce(torch.zeros(64).int(), "sum"), "all_reduce (sum) of 64 x int32 over ranks 4, 7, 9"),
        (lambda c: c.broadcast(torch.zeros(64), 2), "broadcast from rank 9 of 64 x float32 over ranks 4, 7, 9"),
        (lambda c: c.barrier(), "barrier over ranks 4, 7, 9"),
    ],
    ids=["count", "op", "dtype", "kind", "barrier"],
)
def test_different_calls_are_refused_on_all_ranks(odd, words):
    team = Team(3)
    calls = [odd if r == 2 else (lambda c: c.all_reduce(torch.zeros(64), "sum")) for r in range(3)]
    said = messages(team.run(lambda c, r: calls[r](c)))
    usual = "all_reduce (sum) of 64 x float32 over ranks 4, 7, 9"
    for rank, text in zip((4, 7, 9), said, strict=True):
        mine, others = (words, "4, 7") if rank == 9 else (usual, "9")
        first = f"rank {rank} calls {mine}, but rank {others} calls something else there"
        assert text == first or "the ranks are out of step since" in text
    again = messages(team.run(lambda c, r: c.barrier()))
    assert all("barrier over ranks 4, 7, 9: the ranks are out of step since: rank " in text for text in again)


def test_a_rank_that_does_not_come_is_named():
    team, began = Team(3, timeout_s=0.3), time.monotonic()
    x = torch.zeros(5)
    said = messages(team.run(lambda c, r: c.all_reduce(x, "sum") if r != 1 else time.sleep(0.0))[::2])
    assert 0.3 < time.monotonic() - began < 10
    late = "rank 7 did not come within 0.3 s (run.timeout_s); rank {} waited in all_reduce (sum) of 5 x float32"
    assert any(text.startswith(late.format(rank)) for rank, text in zip((4, 9), said, strict=True))
    began = time.monotonic()
    (text,) = messages([team.pool.submit(team.channels[1].barrier).exception(10)])
    assert time.monotonic() - began < 0.2
    assert "rank 7 can't do barrier" in text
    assert "rank 7 did not come" in text


@pytest.fixture
def zombie():
    """A process that was killed and that nobody has waited for."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    process = process_of(pid)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    yield process
    os.waitpid(pid, 0)


@pytest.mark.parametrize("kind", ["gone", "zombie", "pid used again"])
def test_a_dead_rank_is_named_long_before_the_time_limit(kind, zombie):
    me = this_process()
    dead = {"gone": GONE, "zombie": zombie, "pid used again": Process(me.pid, me.start - 1)}[kind]
    team, began = Team(2, dead=dead, timeout_s=500.0), time.monotonic()
    (text,) = messages([team.pool.submit(team.channels[0].barrier).exception(10)])
    assert time.monotonic() - began < 5
    assert text == f"rank 7 died (pid {dead.pid}); rank 4 waited for it in barrier over ranks 4, 7"


def test_a_rank_that_ended_after_its_part_does_no_harm():
    """It posted all that the others need, so its death is not looked at although another rank lets us wait."""
    team = Team(3, dead=GONE)
    calls = [lambda c: c.barrier(), lambda c: c.barrier(), lambda c: (time.sleep(0.5), c.barrier())[1]]
    assert team.run(lambda c, r: calls[r](c)) == [None] * 3


def test_a_signal_ends_a_wait_and_the_channel():
    team = Team(2)

    def stop(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            team.channels[0].barrier()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(RuntimeError, match=r"since: rank 4 was interrupted \(KeyboardInterrupt\) in barrier"):
        team.channels[1].barrier()


def test_waiting_lets_other_threads_run():
    team, ticks = Team(2), []
    waiting = team.pool.submit(team.channels[0].barrier)
    for _ in range(3):
        ticks.append(waiting.done())
        time.sleep(0.01)
    team.channels[1].barrier()
    waiting.result(10)
    assert ticks == [False] * 3


def test_wrong_sizes_of_a_channel():
    lib = native.load()
    for size, slot in ((1, 1024), (2, 1000), (32, 1024)):
        with pytest.raises(ValueError, match="multiple of 128"):
            lib.shm_segment_bytes(size, slot)
