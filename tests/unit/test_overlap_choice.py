"""Which overlap backend a site gets: explicit choices, what the recorded rates predict, and the log of it."""

from dataclasses import replace

import pytest
import torch

from megalite.config.overlap import Overlap
from megalite.mesh import Group
from megalite.parallel.tp.overlap.base import Passes
from megalite.parallel.tp.overlap.choose import NO_CHOICES, Linear, choose
from megalite.parallel.tp.overlap.chunked import Chunked
from megalite.parallel.tp.overlap.none import NO_OVERLAP
from megalite.parallel.tp.overlap.table import MIN_GAIN, RATES, LinearSize, predict
from megalite.parallel.tp.rows import TensorParallel

LINEARS = [Linear("attention.qkv", "column", 1024, 192), Linear("mlp.down", "row", 1024, 256)]
SIZE = LinearSize("gather_gemm", 4096, 1024, 128, 4, 2, True)
RATE = RATES["gloo"]


def tp_group(size: int, *, rank: int = 0, sequence_parallel: bool = True) -> TensorParallel:
    return TensorParallel(Group("tp", ranks=tuple(range(size)), rank=rank), sequence_parallel)


def never() -> None:
    raise AssertionError("nothing here uses symm")


def chosen(
    section: dict, *, tp: TensorParallel, rows: int = 4096, transport: str = "gloo", dtype=torch.float32, symm=never
):
    wanted = Overlap.model_validate(section)
    return choose(wanted, LINEARS, rows=rows, dtype=dtype, tp=tp, transport=transport, symm=symm)


def test_one_rank_has_nothing_to_choose():
    assert chosen({}, tp=tp_group(1)) is NO_CHOICES
    assert NO_CHOICES["attention.qkv"] == Passes(NO_OVERLAP, NO_OVERLAP)


def test_sites_win_over_the_backend():
    section = {"backend": "chunked", "chunks": 3, "sites": {"mlp": {"down": {"backward": "none"}}}}
    found = chosen(section, tp=tp_group(2))
    assert found["attention.qkv"] == Passes(Chunked(3), Chunked(3))
    assert found["mlp.down"] == Passes(Chunked(3), NO_OVERLAP)
    assert found.by_site["mlp.down.backward"].why == "configured"
    assert found.source == ""


def test_symm_is_made_once_and_only_where_something_is_sent():
    made = []
    found = chosen({"backend": "symm"}, tp=tp_group(2), symm=lambda: made.append(object()) or made[0])
    assert [*found["attention.qkv"], *found["mlp.down"]] == [made[0]] * 4
    assert len(made) == 1
    tp = tp_group(2, sequence_parallel=False)
    chosen({"backend": "none", "sites": {"attention.qkv.forward": "symm"}}, tp=tp)


def test_without_sequence_parallel_only_reductions_are_decomposed():
    found = chosen({"backend": "chunked"}, tp=tp_group(2, sequence_parallel=False))
    assert [found["attention.qkv"].forward.name, found["attention.qkv"].backward.name] == ["none", "chunked"]
    assert [found["mlp.down"].forward.name, found["mlp.down"].backward.name] == ["chunked", "none"]
    assert "nothing is sent" in found.by_site["attention.qkv.forward"].why


def test_auto_takes_pieces_for_large_shapes_only_and_says_why():
    large, small = chosen({}, tp=tp_group(2)), chosen({}, tp=tp_group(2), rows=8)
    assert large["mlp.down"].forward.name == "chunked"
    assert {choice.backend.name for choice in small.by_site.values()} == {"none"}
    assert all("pieces don't pay" in choice.why for choice in small.by_site.values())
    assert RATE.source in large.table()
    assert "piece" in large.table()


@pytest.mark.parametrize("transport", ["shm", "symm"])
def test_auto_never_takes_pieces_where_collectives_leave_no_room(transport):
    found = chosen({}, tp=tp_group(2), transport=transport)
    assert {choice.backend.name for choice in found.by_site.values()} == {"none"}
    assert all(f"over {transport}" in choice.why for choice in found.by_site.values())
    assert found.source == ""
    configured = chosen({"backend": "chunked"}, tp=tp_group(2), transport=transport)
    assert configured["mlp.down"].forward.name == "chunked"


@pytest.mark.parametrize(("transport", "dtype"), [("gloo", torch.float64), ("nccl", torch.bfloat16)])
def test_every_rank_chooses_the_same(transport, dtype):
    ranks = (tp_group(4, rank=rank) for rank in range(4))
    tables = {chosen({}, tp=tp, transport=transport, dtype=dtype).table() for tp in ranks}
    assert len(tables) == 1


@pytest.mark.parametrize(
    ("way", "sequence_parallel"),
    [("gather_gemm", True), ("gather_dgrad", True)]
    + [(way, sp) for way in ("gemm_reduce", "dgrad_reduce") for sp in (True, False)],
)
def test_predictions_stay_above_their_floors(way, sequence_parallel):
    """Never below what the GEMMs take alone, nor below the wire alone; and not far above both in a row."""
    size = replace(SIZE, way=way, sequence_parallel=sequence_parallel)
    gemms = 2 if way in ("dgrad_reduce", "gather_dgrad") else 1
    gemm = gemms * 2 * size.rows * size.row_size * size.local_size / RATE.flops[4]
    wire = (1 if sequence_parallel else 2) * size.rows * size.row_size * 4 / 2 / RATE.wire
    for slower in (1.0, 30.0):
        rates = replace(RATE, wire=RATE.wire / slower)
        found = predict(size, rates)
        assert max(gemm, wire * slower) <= found.chunked_s <= 1.01 * (gemm + wire * slower) + 20 * rates.message_s
        assert found.none_s <= 1.01 * (gemm + wire * slower) + 2 * rates.latency_s


def test_the_number_of_pieces_follows_from_the_shape():
    assert predict(SIZE, RATE).chunks == 8
    assert predict(replace(SIZE, rows=512), RATE).chunks < 8  # messages cost more than waiting for the last piece
    assert predict(replace(SIZE, local_size=1024), RATE).chunks == 1  # the wire is hidden under the own rows' GEMM
    free = replace(RATE, message_s=0.0, gemm_s=0.0, tile=(1, 1))
    assert predict(replace(SIZE, rows=4), free).chunks == 2  # not more than rows
    assert predict(SIZE, RATE, chunks=5).chunks == 5


def test_a_gain_below_the_margin_does_not_pay():
    found = predict(SIZE, RATE)
    assert replace(found, chunked_s=found.none_s / MIN_GAIN * 1.01).pays is False
    assert replace(found, chunked_s=found.none_s / MIN_GAIN * 0.99).pays is True
