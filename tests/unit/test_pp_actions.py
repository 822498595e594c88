"""Actions print and parse back; CSV files keep them."""

import pytest

from megalite.parallel.pp.actions import Action, Op, format_rows, parse_action, parse_rows, partner, read_csv, write_csv


@pytest.mark.parametrize("op", list(Op))
def test_printed_action_parses_back(op):
    mb = None if op in (Op.GATHER, Op.RESHARD) else 10
    assert parse_action(str(Action(op, 12, mb))) == Action(op, 12, mb)


def test_actions_print_as_stage_op_microbatch():
    assert str(Action(Op.F, 2, 0)) == "2F0"
    assert str(Action(Op.SEND_F, 3, 1)) == "3SEND_F1"
    assert str(Action(Op.GATHER, 2)) == "2GATHER"
    assert (str(Action(Op.REDUCE, 2)), str(Action(Op.REDUCE, 2, 4))) == ("2REDUCE", "2REDUCE4")


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2GATHER1", "2f0", "-1F0", "2F0 1B0", "2SEND0", "2F-1"])
def test_bad_text_is_refused(text):
    with pytest.raises(ValueError, match="action"):
        parse_action(text)


@pytest.mark.parametrize(
    ("send", "receive"), [("0SEND_F3", "1RECV_F3"), ("1SEND_B3", "0RECV_B3"), ("4SEND_F0", "5RECV_F0")]
)
def test_partners_name_the_stage_at_their_end(send, receive):
    assert partner(parse_action(send)) == parse_action(receive)
    assert partner(parse_action(receive)) == parse_action(send)


def test_csv_round_trip(tmp_path):
    rows = parse_rows("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    write_csv(rows, tmp_path / "s.csv")
    assert read_csv(tmp_path / "s.csv") == rows
    assert format_rows(rows) == (tmp_path / "s.csv").read_text()
    assert [len(row) for row in rows] == [4, 4]


def test_csv_error_names_file_and_line(tmp_path):
    (tmp_path / "s.csv").write_text("0F0\n1F0,1Q0\n")
    with pytest.raises(ValueError, match=r"s\.csv, line 2: action '1Q0'"):
        read_csv(tmp_path / "s.csv")
