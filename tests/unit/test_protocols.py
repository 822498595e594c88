"""The protocols between ranks hold in every interleaving, and each planted fault is found by the same exploration.

For 2 and 3 ranks, enough calls that both buffers are used again, epochs that wrap, blocks that must share slots.
"""

import pytest

from tests.protocols import collectives, fused
from tests.protocols.explore import Step, System

pytestmark = pytest.mark.timeout(60)
EARLY, LATE, STUCK = "read before write", "overwritten before the last read", "deadlock"
WRAPS = 7
"""Flags count modulo 8, so that the second call is past the wrap."""
PROTOCOLS = {
    "gather_gemm": fused.gather_gemm,
    "gemm_scatter": lambda case: fused.gemm_reduce(case, all_reduce=False),
    "gemm_all_reduce": lambda case: fused.gemm_reduce(case, all_reduce=True),
}
FOUND = {
    "flags reset": (STUCK, STUCK, STUCK),
    "one buffer": (LATE, LATE, LATE),
    "no done wait": (LATE, LATE, ""),
    "relaxed release": (EARLY, EARLY, EARLY),
    "producer needs an SM": (STUCK, STUCK, STUCK),
    "wrong buffer": (EARLY, EARLY, EARLY),
    "done early": (LATE, LATE, ""),
    "unsigned compare": (EARLY, STUCK, STUCK),
}
"""Fault -> what it leads to in each protocol. In GEMM+AR all ranks wait for all results, and those for the reads of the
tiles, so that DONE adds nothing: it is not needed there, and leaving it out is no fault."""


def slots(name: str, size: int) -> int:
    """As few as the GEMM has blocks, but where the exploration would take long."""
    return 3 if name == "gemm_all_reduce" and size == 3 else 2


@pytest.mark.parametrize(("size", "first_epoch"), [(2, 1), (2, WRAPS), (3, WRAPS)])
@pytest.mark.parametrize("name", PROTOCOLS)
def test_fused_protocols_hold(name, size, first_epoch):
    case = fused.Case(size, slots=slots(name, size), first_epoch=first_epoch)
    outcome = PROTOCOLS[name](case).explore()
    assert not outcome.violation, outcome
    assert outcome.states > 100


@pytest.mark.parametrize(("name", "calls"), [("gather_gemm", 6), ("gemm_scatter", 5), ("gemm_all_reduce", 4)])
def test_more_calls_on_two_ranks(name, calls):
    outcome = PROTOCOLS[name](fused.Case(2, calls=calls, first_epoch=WRAPS)).explore()
    assert not outcome.violation, outcome


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("fault", fused.FAULTS)
@pytest.mark.parametrize(("name", "index"), [(name, index) for index, name in enumerate(PROTOCOLS)])
def test_fused_faults_are_found(name, index, fault, size):
    tight = fault == "producer needs an SM"
    case = fused.Case(size, fault=fault, slots=2 if tight else slots(name, size), first_epoch=WRAPS)
    outcome = PROTOCOLS[name](case).explore()
    assert outcome.violation.partition(":")[0] == FOUND[fault][index], outcome
    assert bool(outcome.trace) == bool(outcome.violation)


ONE_STREAM = {
    "gather_gemm": lambda case: fused.gather_gemm(case, behind=True),
    "gemm_scatter": lambda case: fused.gemm_reduce(case, all_reduce=False, own_stream=False),
    "gemm_all_reduce": lambda case: fused.gemm_reduce(case, all_reduce=True, own_stream=False),
    "gemm_scatter in one launch": lambda case: fused.gemm_reduce_resident(case, all_reduce=False),
    "gemm_all_reduce in one launch": lambda case: fused.gemm_reduce_resident(case, all_reduce=True),
}
"""With each call behind the call before, as megalite's own kernels run."""


@pytest.mark.parametrize(
    ("size", "fault"), [(2, ""), (2, "no done wait"), (2, "done early"), (3, ""), (3, "no done wait")]
)
@pytest.mark.parametrize("name", ONE_STREAM)
def test_on_one_stream_the_ready_flags_imply_done(name, fault, size):
    """A peer's flags of call n + 1 say that it has read what it got in call n: DONE is a second proof of the same."""
    case = fused.Case(size, fault=fault, slots=size, first_epoch=WRAPS)
    outcome = ONE_STREAM[name](case).explore()
    assert not outcome.violation, outcome


ONE_LAUNCH_FOUND = {
    "flags reset": (STUCK, STUCK),
    "one buffer": (LATE, ""),
    "relaxed release": (EARLY, EARLY),
    "producer needs an SM": (STUCK, STUCK),
    "wrong buffer": (EARLY, EARLY),
    "unsigned compare": (EARLY, EARLY),
}
"""As FOUND, for GEMM+RS and GEMM+AR in one launch. Who has all results knows that all have read: one buffer will do."""


@pytest.mark.parametrize("fault", ONE_LAUNCH_FOUND)
@pytest.mark.parametrize("all_reduce", [False, True])
def test_faults_of_one_launch_are_found(fault, all_reduce):
    case = fused.Case(2, fault=fault, first_epoch=WRAPS)
    outcome = fused.gemm_reduce_resident(case, all_reduce=all_reduce).explore()
    assert outcome.violation.partition(":")[0] == ONE_LAUNCH_FOUND[fault][all_reduce], outcome


MIXES = [("plain", "plain", "plain"), ("plain", "switched", "switched", "plain"), ("switched", "switched", "switched")]


@pytest.mark.parametrize(("size", "channels", "slots"), [(2, 1, 1), (2, 2, 1), (2, 2, 2), (3, 1, 1), (3, 2, 1)])
@pytest.mark.parametrize("calls", MIXES)
def test_collectives_hold(calls, size, channels, slots):
    case = collectives.Case(size, calls=calls, channels=channels, slots=slots, first_epoch=WRAPS)
    outcome = collectives.collectives(case).explore()
    assert not outcome.violation, outcome
    assert outcome.states > 50


COLLECTIVE_FOUND = {
    "flags reset": STUCK,
    "one buffer": LATE,
    "no wait": EARLY,
    "relaxed release": EARLY,
    "announced early": LATE,
    "wrong buffer": EARLY,
    "unsigned compare": EARLY,
    "any order": STUCK,
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("calls", [("plain", "plain", "plain"), ("switched", "plain", "plain")])
@pytest.mark.parametrize("fault", collectives.FAULTS)
def test_faults_of_collectives_are_found(fault, calls, size):
    channels = 1 + (fault == "any order")
    case = collectives.Case(size, calls=calls, channels=channels, slots=1, first_epoch=WRAPS, fault=fault)
    outcome = collectives.collectives(case).explore()
    assert outcome.violation.partition(":")[0] == COLLECTIVE_FOUND[fault], outcome


SMALL = [
    *((name, fault) for name in PROTOCOLS for fault in ("", *fused.FAULTS)),
    *(("collectives", fault) for fault in ("", *collectives.FAULTS)),
]


@pytest.mark.parametrize(("name", "fault"), SMALL)
def test_leaving_interleavings_out_changes_no_verdict(name, fault):
    if name == "collectives":
        case = collectives.Case(2, calls=("plain", "plain"), channels=1 + (fault == "any order"), fault=fault)
        system = collectives.collectives(case)
    else:
        case = fused.Case(2, calls=3, blocks=1, slots=1, fault=fault, first_epoch=WRAPS)
        system = PROTOCOLS[name](case)
    full, reduced = system.explore(reduced=False), system.explore()
    assert bool(full.violation) == bool(reduced.violation), (full, reduced)
    assert reduced.states <= full.states or full.violation


def test_the_explorer_sees_what_it_must():
    """Two actors by hand: a race on one word, found in either order, and a trace that leads to it."""
    system = System()
    system.add("writer", [Step("write", "word", 1), Step("set", "flag", 1), Step("write", "word", 2)])
    system.add("reader", [Step("wait", "flag", 1), Step("read", "word", 1)])
    outcome = system.explore()
    assert outcome.violation == "overwritten before the last read: reader wants 1 in word, finds 2"
    assert [step for step in outcome.trace if "word" in step] == ["writer: write word 1", "writer: write word 2"]
    system = System(slots={"gpu": 1})
    system.add("waiter", [Step("wait", "flag", 1)], gpu="gpu")
    system.add("setter", [Step("set", "flag", 1)], gpu="gpu")
    assert system.explore().violation.startswith("deadlock: waiter at wait flag")
    assert (
        not System(slots={"gpu": 2}, names=system.names, programs=system.programs, after=system.after)
        .explore()
        .violation
    )
