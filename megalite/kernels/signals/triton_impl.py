"""Waiting for flags and setting them, in Triton; begin and finish of a call, see [Note: one call] in peers.py.

A wait is one thread's acquire at system scope and a block barrier, a signal is a block barrier and one thread's release
at system scope; both come with Triton's scalar atomics. Its bound is a number of looks, not a clock: each thread would
read another time, and a block must leave the loop together. (`and` does not skip its right side here: nested ifs do.)
"""

import triton
import triton.language as tl

from megalite.kernels.compile_cases import CompileCase
from megalite.kernels.signals.peers import Peers

READY = tl.constexpr(0)
DONE = tl.constexpr(1)
RESULT = tl.constexpr(2)


@triton.jit
def wait_flag(flags, peer, column, expected, errors, rank, limit, NUM_FLAGS: tl.constexpr):
    """Wait until flags[peer, column] has reached `expected`, `limit` looks, or, after any failure, one; is it late?

    Returns 0 or 1. Results that follow a 1 are to be NaN, so that no step uses them before the host raises.
    """
    flag = flags + peer * NUM_FLAGS + column
    got = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    looks = 0
    if got - expected < 0:  # noqa: SIM102
        if tl.atomic_add(errors, 0, sem="relaxed", scope="gpu") != 0:
            looks = limit
    while (got - expected < 0) & (looks < limit):
        got = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        looks += 1
    if got - expected < 0:  # noqa: SIM102
        if tl.atomic_cas(errors, 0, 1, sem="relaxed", scope="gpu") == 0:
            tl.store(errors + 1, rank)
            tl.store(errors + 2, peer)
            tl.store(errors + 3, column)
            tl.store(errors + 4, expected)
            tl.store(errors + 5, got)
    return (got - expected < 0).to(tl.int32)


@triton.jit
def set_flag(flag_pointers, peer, rank, column, value, NUM_FLAGS: tl.constexpr):
    """Release everything that this block has written or seen, and set this rank's flag at `peer`."""
    flags = tl.load(flag_pointers + peer).to(tl.pointer_type(tl.int32))
    tl.debug_barrier()
    tl.atomic_xchg(flags + rank * NUM_FLAGS + column, value, sem="release", scope="sys")


@triton.jit(do_not_specialize=["index", "rank", "limit"])
def _begin(epoch, used, flags, counters, errors, index, rank, limit, SIZE: tl.constexpr, NUM_FLAGS: tl.constexpr):
    now = tl.atomic_add(epoch, 1, sem="relaxed", scope="gpu") + 1
    before = tl.atomic_xchg(used + index, now, sem="relaxed", scope="gpu")
    for counter in range(SIZE + 1):
        tl.store(counters + counter, 0)
    for peer in range(SIZE):
        if peer != rank:
            wait_flag(flags, peer, DONE, before, errors, rank, limit, NUM_FLAGS)


@triton.jit(do_not_specialize=["rank"])
def _finish(epoch, flag_pointers, rank, SIZE: tl.constexpr, NUM_FLAGS: tl.constexpr):
    now = tl.load(epoch)
    for peer in range(SIZE):
        if peer != rank:
            set_flag(flag_pointers, peer, rank, DONE, now, NUM_FLAGS)


def begin(peers: Peers, index: int) -> None:
    """Start a call on buffer `index`: the next epoch, zero counters, and every peer is done with that buffer."""
    _begin[(1,)](
        peers.epoch,
        peers.used,
        peers.flags,
        peers.counters,
        peers.errors,
        index,
        peers.rank,
        peers.limit,
        SIZE=peers.size,
        NUM_FLAGS=peers.flags.shape[1],
        num_warps=1,
    )


def finish(peers: Peers) -> None:
    """End a call: all that read this call's buffer came before this on the stream."""
    _finish[(1,)](
        peers.epoch, peers.flag_pointers, peers.rank, SIZE=peers.size, NUM_FLAGS=peers.flags.shape[1], num_warps=1
    )


WAITS = (r"LDG\.E\.STRONG\.SYS", r"CCTL\.IVALL")
"""SASS of an acquire at system scope: the load, then the L1 forgets what it has."""
SIGNALS = (r"MEMBAR\.\S*SYS", r"EXCH\.STRONG\.SYS")
"""SASS of a release at system scope."""

COMPILE = [
    CompileCase(
        _begin,
        name="signals/begin",
        signature=dict.fromkeys(("epoch", "used", "flags", "counters", "errors"), "*i32")
        | dict.fromkeys(("index", "rank", "limit"), "i32"),
        constexprs={"SIZE": 8, "NUM_FLAGS": 64},
        num_warps=1,
        expect={"sm_80": WAITS, "sm_90": WAITS},
    ),
    CompileCase(
        _finish,
        name="signals/finish",
        signature={"epoch": "*i32", "flag_pointers": "*i64", "rank": "i32"},
        constexprs={"SIZE": 8, "NUM_FLAGS": 64},
        num_warps=1,
        expect={"sm_80": SIGNALS, "sm_90": SIGNALS},
    ),
]
