"""Overlap backends against `none` on real ranks: values, gathered rows, the ledger, the bits of a second run."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.comm import pieces
from megalite.mesh import Sizes
from megalite.observe.spans import Spans
from megalite.parallel.tp.overlap.base import ALL_ROWS, Overlap
from megalite.parallel.tp.overlap.chunked import Chunked
from megalite.parallel.tp.overlap.none import NO_OVERLAP
from megalite.parallel.tp.rows import TensorParallel
from tests.dist.pool import mesh_for, run_ranks

K, N = 12, 10


def random(name: str, rank: int, *shape: int, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """The same numbers for the same name and rank (-1: whatever the rank), rounded to each of `dtypes` in turn."""
    seed = sum(map(ord, name)) * 100 + rank + 1
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for dtype in dtypes:
        made = made.to(dtype)
    return made


def four_functions(overlap: Overlap, tp: TensorParallel, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Every output of a backend on inputs that depend on the rank."""
    num_rows, dtype = settings["num_rows"], settings["dtype"]
    own = partial(random, dtypes=(settings.get("rounded", dtype), dtype))
    local_rows = tp.num_local_rows(num_rows)
    x = own("x", tp.rank if tp.sequence_parallel else -1, local_rows, K)
    wide, tall = own("wide", tp.rank, N, K), own("tall", tp.rank, K, N)
    bias, late = own("bias", tp.rank, N), own("late", -1, K)
    dy, hidden = own("dy", tp.rank, num_rows, N), own("hidden", tp.rank, num_rows, N)
    found: dict[str, Tensor] = {}
    found["y"], found["full"] = overlap.gather_gemm(x, wide, bias, tp=tp, site="up.forward")
    found["y no bias"], _ = overlap.gather_gemm(x.t().contiguous().t(), wide, None, tp=tp, site="up.forward")
    found["out"] = overlap.gemm_reduce(hidden, tall, late, tp=tp, site="down.forward")
    found["out no bias"] = overlap.gemm_reduce(hidden, tall, None, tp=tp, site="down.forward")
    found["dx"], found["meanwhile"] = overlap.dgrad_reduce(
        dy, wide, tp=tp, site="up.backward", meanwhile=lambda: dy.t().mm(found["full"])
    )
    found["dhidden"], found["wgrad"] = overlap.gather_dgrad(
        x, tall, tp=tp, site="down.backward", meanwhile=lambda full, rows=ALL_ROWS: full[rows].t().mm(hidden[rows])
    )
    return found


def run_as_nccl_does(rank: int, world: int, overlap: Overlap, settings: dict[str, Any]) -> tuple[dict, dict]:
    """The same with each receive posted in one operation with the send of its step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_receives_first", lambda tensor: False)
        return run_backend(rank, world, overlap, settings)


def run_backend(rank: int, world: int, overlap: Overlap, settings: dict[str, Any]) -> tuple[dict, dict]:
    """Outputs and ledger of one rank."""
    mesh = mesh_for(Sizes(tp=world))
    tp = TensorParallel(mesh.tp, settings["sequence_parallel"])
    found = four_functions(overlap, tp, settings)
    entries = {(e.op, e.site): (calls, mesh.ledger.sent_bytes[e]) for e, calls in mesh.ledger.calls.items()}
    return found, entries


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "no_sp"])
@pytest.mark.parametrize(("world", "rows", "chunks"), [(2, 28, 3), (2, 6, 8), (3, 21, 2), (4, 40, 1), (4, 4, 4)])
def test_chunked_equals_none_and_sends_the_same(world, rows, chunks, sequence_parallel):
    settings = {"sequence_parallel": sequence_parallel, "num_rows": rows, "dtype": torch.float64}
    expected = run_ranks(world, run_backend, NO_OVERLAP, settings)
    found = run_ranks(world, run_backend, Chunked(chunks), settings)
    again = run_ranks(world, run_backend, Chunked(chunks), settings)
    for (values, entries), (truth, counted), (repeated, _) in zip(found, expected, again, strict=True):
        assert entries == counted
        assert len(entries) == (4 if sequence_parallel else 2)
        assert torch.equal(values["full"], truth["full"])
        for name, value in truth.items():
            torch.testing.assert_close(values[name], value, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
            assert torch.equal(values[name], repeated[name]), f"{name} differs between two runs"
    if not sequence_parallel:
        for name in ("out", "out no bias", "dx"):
            assert all(torch.equal(values[name], found[0][0][name]) for values, _ in found), f"{name} differs by rank"


@pytest.mark.parametrize("world", [2, 3])
def test_receives_that_go_with_their_sends_give_the_same_bits(world):
    settings = {"sequence_parallel": True, "num_rows": 12, "dtype": torch.float64}
    first = run_ranks(world, run_backend, Chunked(2), settings)
    together = run_ranks(world, run_as_nccl_does, Chunked(2), settings)
    for (one, _), (other, _) in zip(first, together, strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())


def traced_waits(rank: int, world: int, sequence_parallel: bool) -> set[str]:
    """Names of what a traced step waited for."""
    mesh = mesh_for(Sizes(tp=world))
    mesh.ledger.spans = Spans(mesh.device, limit=1000)
    settings = {"num_rows": 8, "dtype": torch.float32}
    four_functions(Chunked(2), TensorParallel(mesh.tp, sequence_parallel), settings)
    found, mesh.ledger.spans = mesh.ledger.spans.take(), None
    return {span.name for span in found if span.kind == "collective"}


def test_waits_for_pieces_are_spans_of_a_trace():
    reduced = {"wait up.backward tp", "wait down.forward tp"}
    assert run_ranks(2, traced_waits, False) == [reduced] * 2
    assert run_ranks(2, traced_waits, True) == [reduced | {"wait up.forward tp", "wait down.backward tp"}] * 2


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "no_sp"])
def test_chunked_rounds_bf16_no_more_than_none(sequence_parallel):
    """Against float64 from the same rounded inputs; with sequence parallel, sums are in fp32 and rounded once."""
    errors = {}
    settings = {"sequence_parallel": sequence_parallel, "num_rows": 24}
    truth = run_ranks(3, run_backend, NO_OVERLAP, settings | {"dtype": torch.float64, "rounded": torch.bfloat16})
    for backend in (NO_OVERLAP, Chunked(2)):
        ranks = run_ranks(3, run_backend, backend, settings | {"dtype": torch.bfloat16})
        pairs = [(r[0][name], t[0][name]) for r, t in zip(ranks, truth, strict=True) for name in ("y", "out", "dx")]
        errors[backend.name] = max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)
    assert 1e-3 < errors["none"] < 2e-2
    assert errors["chunked"] <= 1.2 * errors["none"]


def order_of_events(rank: int, world: int, sequence_parallel: bool) -> dict[str, str]:
    """Per function of the backend one letter per event: r a receive is announced, s a send or an all-reduce starts,
    m a product, w a wait, g the weight gradient."""
    tp, log = TensorParallel(mesh_for(Sizes(tp=world)).tp, sequence_parallel), []

    def logged(function, letter: str):
        def call(*args, **kwargs):
            log.append(letter)
            return function(*args, **kwargs)

        return call

    x, dy = torch.ones(tp.num_local_rows(8), K), torch.ones(8, N)
    wide, tall = torch.ones(N, K), torch.ones(K, N)
    backend, how, found = Chunked(2), {"tp": tp, "site": "here"}, {}
    calls = {
        "gather_gemm": lambda: backend.gather_gemm(x, wide, None, **how),
        "gemm_reduce": lambda: backend.gemm_reduce(dy, tall, None, **how),
        "dgrad_reduce": lambda: backend.dgrad_reduce(dy, wide, meanwhile=lambda: log.append("g"), **how),
        "gather_dgrad": lambda: backend.gather_dgrad(
            x, tall, meanwhile=lambda full, rows=ALL_ROWS: log.append("g"), **how
        ),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "mm", logged(torch.mm, "m"))
        patch.setattr(pieces.dist, "isend", logged(pieces.dist.isend, "s"))
        patch.setattr(pieces.dist, "irecv", logged(pieces.dist.irecv, "r"))
        patch.setattr(pieces.dist, "all_reduce", logged(pieces.dist.all_reduce, "s"))
        patch.setattr(pieces.Work, "wait", logged(pieces.Work.wait, "w"))
        for name, call in calls.items():
            log.clear()
            call()
            found[name] = "".join(log)
    return found


def test_the_order_of_pieces_lets_the_wire_work_under_every_product():
    """2 ranks, 2 pieces. A gather is under way before the own rows' product and its weight gradient, and each piece is
    multiplied when it is there; a reduction's pieces leave before the next product, and nothing is waited for before
    the last one and the weight gradient."""
    for found in run_ranks(2, order_of_events, True):
        assert found["gather_gemm"].startswith("rrssmwmwm")
        assert found["gather_dgrad"].startswith("rrssmgwmwmg")
        assert found["gemm_reduce"].startswith("rrmsmsmw")
        assert found["dgrad_reduce"].startswith("rrmsmsmgw")
        assert all(events.strip("w").count("m") == 3 for events in found.values())
    for found in run_ranks(2, order_of_events, False):
        assert found["gemm_reduce"] == "msmsmsmswwww"
        assert found["dgrad_reduce"] == "msmsmsmsgwwww"
