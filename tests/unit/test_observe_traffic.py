"""The traffic table: sums per axis and op, their order, the sites it names, and the moment it is taken at."""

import pytest

from megalite.observe.ledger import Ledger
from megalite.observe.traffic import sent_so_far, traffic_table


def filled() -> Ledger:
    ledger = Ledger()
    ledger.record("tp", "all_gather", "mlp.up.forward", 2_000_000)
    ledger.record("tp", "all_gather", "mlp.up.forward", 2_000_000)
    ledger.record("tp", "all_gather", "attention.out.backward", 1_000_000)
    ledger.record("tp", "all_gather", "mlp.down.backward", 500_000)
    ledger.record("tp", "all_gather", "head.forward", 400_000)
    ledger.record("tp", "reduce_scatter", "mlp.up.backward", 100_000)
    ledger.record("pp", "send", "SEND_F", 7_000_000)
    return ledger


def rows(sent: dict) -> list[tuple]:
    return list(zip(*(column.cells for column in traffic_table(sent, title="sent").columns), strict=True))


def test_rows_are_sums_sorted_by_bytes_with_their_largest_sites():
    assert rows(sent_so_far(filled())) == [
        ("pp", "send", "1", "7.000", "53.8%", "SEND_F"),
        ("tp", "all_gather", "5", "5.900", "45.4%", "mlp.up, attention.out, mlp.down, ..."),
        ("tp", "reduce_scatter", "1", "0.100", "0.8%", "mlp.up"),
        ("all", "", "7", "13.000", "", ""),
    ]


def test_the_copy_outlives_a_reset():
    ledger = filled()
    sent = sent_so_far(ledger)
    ledger.reset()
    assert rows(sent)[-1][3] == "13.000"
    assert sent_so_far(ledger) == {}


@pytest.mark.parametrize("num_bytes", [0, 1])
def test_hardly_any_bytes(num_bytes):
    ledger = Ledger()
    ledger.record("dp", "broadcast", "state", num_bytes)
    assert rows(sent_so_far(ledger))[0] == ("dp", "broadcast", "1", "0.000", "100.0%" if num_bytes else "-", "state")
