"""The kernels of `symm` on 2, 3 and 4 processes: equal to plain torch, with pauses on either side and wrapping epochs.

Faults planted in the protocol must show as wrong results, and a rank that does not come as an error with its number.
"""

from dataclasses import replace

import pytest
import torch

from megalite.kernels.gemm_scatter import reference as scatter_reference
from megalite.mesh import Sizes
from megalite.parallel.tp.overlap.none import NO_OVERLAP
from megalite.parallel.tp.overlap.symm import open_symm
from megalite.parallel.tp.rows import TensorParallel
from tests.dist.pool import mesh_for, run_ranks
from tests.dist.symm_tools import BEFORE_WRAP, Job, make_overlap, one_call, run_job

TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 1e-3}
"""Relative to the reference, which rounds in the same places; sums of products differ in order."""
NO_SP = {"sequence_parallel": False}
JOBS = {
    (2, "gather"): Job("gather_gemm", 17, 40, 19),
    (2, "gather, transposed"): Job("gather_dgrad", 18, 33, 24, dtype=torch.float16),
    (2, "scatter"): Job("gemm_reduce", 19, 33, 20),
    (2, "scatter, transposed"): Job("dgrad_reduce", 16, 40, 17, bias=False),
    (2, "all-reduce"): Job("gemm_reduce", 35, 33, 20, dtype=torch.float16, **NO_SP),
    (3, "gather"): Job("gather_gemm", 5, 34, 17, dtype=torch.float64),
    (3, "scatter"): Job("gemm_reduce", 5, 34, 17, bias=False),
    (3, "all-reduce"): Job("gemm_reduce", 10, 13, 9, dtype=torch.float64, **NO_SP),
    (3, "all-reduce, transposed"): Job("dgrad_reduce", 1, 3, 2, **NO_SP),
    (4, "gather"): Job("gather_gemm", 3, 35, 9),
    (4, "scatter"): Job("gemm_reduce", 3, 7, 9, dtype=torch.float64),
    (4, "all-reduce"): Job("gemm_reduce", 5, 7, 9, **NO_SP),
}
"""World and what is called; odd sizes, tiles and segments with tails, segments with no row (5 rows of 4 ranks)."""


def run(world: int, job: Job) -> list[dict]:
    return run_ranks(world, run_job, job, timeout_s=60)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("world", "what"), JOBS)
def test_equal_to_plain_torch(world, what):
    """Six calls with fresh data, epochs past 2^31, pauses before and after each phase."""
    job = replace(JOBS[world, what], epoch=BEFORE_WRAP, delays=True)
    ranks = run(world, job)
    assert max(max(rank["errors"]) for rank in ranks) <= TOLERANCE[job.dtype]
    if not job.sequence_parallel:
        for rank in ranks[1:]:
            assert all(torch.equal(a[0], b[0]) for a, b in zip(rank["results"], ranks[0]["results"], strict=True))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("what", ["scatter", "all-reduce"])
def test_the_same_bits_in_every_run(what):
    """Other pauses, other arrivals, the same sums; fp32 with sums of three that depend on their order."""
    job = replace(JOBS[3, what], dtype=torch.float32, num_calls=3)
    fast, slow = run(3, job), run(3, replace(job, delays=True))
    for one, other in zip(fast, slow, strict=True):
        assert all(torch.equal(a[0], b[0]) for a, b in zip(one["results"], other["results"], strict=True))


def sums_of_exact_products(rank: int, world: int, sequence_parallel: bool) -> bool:
    """Whether sums of random fp32 numbers, each a product with 1, are the bits of a sum in rank order."""
    group = mesh_for(Sizes(tp=world)).tp
    tp = TensorParallel(group, sequence_parallel)
    overlap = open_symm(group, device=torch.device("cpu"), dtype=torch.float32, timeout_s=60)
    xs = [torch.randn(3 * world, 1, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    weight = torch.ones(40, 1)
    y = overlap.gemm_reduce(xs[rank], weight, None, tp=tp, site="test")
    expected = scatter_reference.forward([(x, weight) for x in xs], None, transposed=False)
    overlap.close()
    return torch.equal(y, expected[rank] if sequence_parallel else torch.cat(expected))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_sums_are_in_rank_order(sequence_parallel):
    """Whoever owns a row and whatever came first."""
    assert run_ranks(4, sums_of_exact_products, sequence_parallel, timeout_s=60) == [True] * 4


FAULTS = {
    "no READY wait": Job("gather_gemm", 16, 8, 8, fault="no READY wait"),
    "no READY wait before the pull": Job("gemm_reduce", 4, 8, 8, fault="no READY wait"),
    "no RESULT wait": Job("gemm_reduce", 8, 8, 8, fault="no RESULT wait", **NO_SP),
    "flag before data": Job("gather_gemm", 8, 8, 8, fault="flag before data"),
    "one buffer without DONE wait": Job("gemm_reduce", 4, 8, 8, fault="no DONE wait", one_buffer=True),
    "one buffer, DONE before the last read": Job("gather_gemm", 4, 8, 8, fault="DONE at once", one_buffer=True),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_give_wrong_results(name):
    ranks = run(2, replace(FAULTS[name], num_calls=3))
    assert max(max(rank["errors"]) for rank in ranks) > 1e-3


@pytest.mark.timeout(120)
@pytest.mark.parametrize("op", ["gather_gemm", "gemm_reduce"])
def test_one_buffer_is_right_with_its_waits(op):
    """Begin waits for the last use of a buffer, whichever it was: rotation is for speed only."""
    ranks = run(2, Job(op, 5, 8, 8, one_buffer=True, delays=True, fault="none, but rank 0 is slow", num_calls=4))
    assert max(max(rank["errors"]) for rank in ranks) <= TOLERANCE[torch.float32]


def leave_alone(rank: int, world: int, job: Job) -> list[str]:
    """Rank 1 takes no part in the second call; the errors of the others, of two calls."""
    group = mesh_for(Sizes(tp=world)).tp
    overlap, tp, texts = make_overlap(group, job, lambda: None), TensorParallel(group, job.sequence_parallel), []
    one_call(overlap, job, tp, 0)
    if rank == 1:
        return texts
    for call in (1, 2):
        try:
            one_call(overlap, job, tp, call)
        except RuntimeError as error:
            texts.append(str(error))
    return texts


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("op", "sequence_parallel"), [("gather_gemm", True), ("gemm_reduce", True), ("gemm_reduce", False)]
)
def test_a_rank_that_does_not_come_is_named(op, sequence_parallel):
    job = Job(op, 3, 4, 4, sequence_parallel=sequence_parallel, timeout_s=0.2)
    for rank, texts in enumerate(run_ranks(3, leave_alone, job, timeout_s=60)):
        assert len(texts) == (0 if rank == 1 else 2)
        for text in texts:
            assert f"rank {rank} waited about 0.2 s for READY of rank 1: expected call 2, found 1" in text


def ledgers(rank: int, world: int, sequence_parallel: bool) -> list[dict]:
    """What `none` and `symm` record of the same four calls."""
    group = mesh_for(Sizes(tp=world)).tp
    tp = TensorParallel(group, sequence_parallel)
    symm = open_symm(group, device=torch.device("cpu"), dtype=torch.float32, timeout_s=60)
    found = []
    for overlap in (NO_OVERLAP, symm):
        group.ledger.reset()
        for op in ("gather_gemm", "gemm_reduce", "dgrad_reduce", "gather_dgrad"):
            one_call(overlap, Job(op, 6, 10, 5, sequence_parallel=sequence_parallel), tp, 0)
        found.append((dict(group.ledger.sent_bytes), dict(group.ledger.calls)))
    symm.close()
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_ledger_counts_as_none_does(sequence_parallel):
    for none, symm in run_ranks(2, ledgers, sequence_parallel, timeout_s=60):
        assert none == symm
        assert none[0]
