"""A schedule from a file: what is written is what is read, and every mistake is named with file and line."""

import re

import pytest

from megalite.parallel.pp.actions import format_rows
from megalite.parallel.pp.check import check
from megalite.parallel.pp.lower import lower
from megalite.parallel.pp.schedules import build_schedule, forward_only

SIZES = [("1f1b", 3, 1, 4), ("interleaved", 2, 3, 4), ("zb_h1", 2, 1, 3), ("zbv", 3, 2, 6), ("dualpipe_v", 2, 2, 5)]
GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1I1,1W1\n"


def read(tmp_path, text, pp=2, virtual=1, m=2):
    path = tmp_path / "own.csv"
    path.write_text(text, encoding="utf-8")
    return build_schedule(str(path), pp=pp, virtual=virtual, num_microbatches=m)


@pytest.mark.parametrize(("kind", "pp", "virtual", "m"), SIZES)
def test_a_written_schedule_reads_back(tmp_path, kind, pp, virtual, m):
    made = build_schedule(kind, pp=pp, virtual=virtual, num_microbatches=m)
    found = read(tmp_path, format_rows(made.actions), pp, virtual, m)
    assert found.name == str(tmp_path / "own.csv")
    assert (found.pp, found.num_stages, found.num_microbatches) == (made.pp, made.num_stages, made.num_microbatches)
    assert (found.stage_rank, found.actions) == (made.stage_rank, made.actions)
    check(lower(found, zero_stage=3, reshard_after="microbatch", reduce_each="step"))
    evaluation = forward_only(found.name, pp=pp, virtual=virtual, num_microbatches=m + 1)
    assert evaluation.stage_rank == made.stage_rank
    check(lower(evaluation, zero_stage=0, reshard_after="step", reduce_each="step"))


def test_any_placement_works(tmp_path):
    """Stages 0 and 1 on rank 1, 2 and 3 on rank 0: no named kind has it."""
    text = "2F0,3F0,3I0,2B0,3W0\n0F0,1F0,1B0,0B0\n"
    schedule = read(tmp_path, text, virtual=2, m=1)
    assert schedule.stage_rank == (1, 1, 0, 0)
    check(lower(schedule, zero_stage=3, reshard_after="forward", reduce_each="microbatch"))


def test_blank_ends_and_spaces_are_fine(tmp_path):
    assert read(tmp_path, "0F0, 0F1, 0B0, 0B1\n1F0,1B0,1F1,1I1,1W1,\n\n").actions == read(tmp_path, GOOD).actions


FAULTS = {
    "nothing": ("", r"own\.csv is empty; .* one line per pp rank \(mesh\.pp=2\) .*pipeline\.schedule=1f1b"),
    "word": (GOOD.replace("1F1", "1X1"), r"own\.csv, line 2: action '1X1' is not .* e\.g\. 2F0"),
    "message": (GOOD.replace("0F1", "0F1,0SEND_F1"), "line 1: 0SEND_F1 is not F, B, I or W; .* remove it"),
    "lines": ("0F0,0B0\n", r"own\.csv has 1 line, one per pp rank, but mesh\.pp=2; use mesh\.pp=1"),
    "empty line": ("0F0,0B0\n\n1F0,1B0\n", r"own\.csv has 3 lines"),
    "microbatches": ("0F0,0B0\n1F0,1B0\n", r"moves 1 microbatch, but batch\.num_microbatches=2; use .*=1 or"),
    "stage twice": (GOOD.replace("1F1", "0F1"), "line 2: 0F1, but stage 0 is on line 1; .* move it to line 1"),
    "stages per rank": (GOOD.replace("0B1", "0B1,2F0,2B0"),
                        r"line 1: 2 stages \(0, 2\), but pipeline\.virtual=1; .* give each line actions of 1 stage"),
    "virtual": ("0F0,1F0,1B0,0B0\n2F0,3F0,3B0,2B0\n", r"line 1: 2 stages \(0, 1\), .* use pipeline\.virtual=2$"),
    "no stage": ("0F0,0B0,0F1,0B1\n2F0,2B0,2F1,2B1\n", "line 2: stage 2, but stage 1 is on no line; .* add stage 1"),
    "twice": (GOOD.replace("0B1", "0B1,0F0"), "line 1: 0F0 after 0F0, 0B0; .* remove one 0F0"),
    "no forward": (GOOD.replace("1F1,", ""), "line 2: 1I1 after nothing of it; .* put 1F1 before it"),
    "weight first": (GOOD.replace("1I1,1W1", "1W1,1I1"), "line 2: 1W1 after 1F1; .* put 1I1 before it"),
    "only a weight": (GOOD.replace("1F1,1I1,", ""), "line 2: 1W1 after nothing of it; .* put 1F1 and 1I1 before it"),
    "both backwards": (GOOD.replace("1W1", "1B1"), "line 2: 1B1 after 1F1, 1I1; .* remove it, or 1I1"),
    "a half too many": (GOOD.replace("1B0", "1B0,1W0"), "line 2: 1W0 after 1F0, 1B0; .* or write 1I0 in place of 1B0"),
    "no backward": (GOOD.replace(",0B1", ""), "line 1: 0B1 is missing; .* F then B, or F, I, W, .*: add 0B1"),
    "no weight gradient": (GOOD.replace(",1W1", ""), "line 2: 1W1 is missing; .* add 1W1"),
    "no microbatch": (GOOD.replace("0F1,0B0,0B1", "0B0"), "line 1: 0F1 is missing; the file has 2 microbatches"),
    "waits forever": (
        "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
        "line 1: 0B0 waits forever for 1B0 on line 2 behind 1F1, which waits for 0F1 on line 1 behind 0B0; .* put 1B0 "
        "in front of 1F1, or 0F1 in front of 0B0$",
    ),
    "not text": ("0F0,0B0\n1F0,0\u00dc0\n", r"own\.csv, line 2: byte 0xc3 is not ASCII, .*; write lines such as 0F0"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_mistakes_are_named_with_file_and_line(tmp_path, fault):
    text, message = FAULTS[fault]
    with pytest.raises(ValueError, match=message) as error:
        read(tmp_path, text)
    assert "own.csv" in str(error.value)


def test_a_missing_file_is_the_users_mistake(tmp_path):
    with pytest.raises(ValueError, match=r"pipeline\.schedule=.*none\.csv can't be read: No such file"):
        build_schedule(str(tmp_path / "none.csv"), pp=2, virtual=1, num_microbatches=2)


WAITS = {
    "two lines": ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", 1),
    "one line": ("1F0,0F0,1B0,0B0\n2F0,3F0,3B0,2B0\n", 2),
    "split": ("0F0,0I0,0F1,0W0,0B1\n1F0,1F1,1I0,1B1,1W0\n", 1),
}


@pytest.mark.parametrize("case", WAITS)
def test_each_way_out_of_a_deadlock_is_one(tmp_path, case):
    text, virtual = WAITS[case]
    m = 2 // virtual
    with pytest.raises(ValueError, match="waits forever") as error:
        read(tmp_path, text, virtual=virtual, m=m)
    ways = re.findall(r"(\w+) in front of (\w+)", str(error.value))
    assert ways
    for moved, behind in ways:
        changed = text.replace(f",{moved}", "").replace(behind, f"{moved},{behind}")
        assert read(tmp_path, changed, virtual=virtual, m=m).num_microbatches == m


def test_a_circle_is_named_without_the_lines_that_only_wait_for_it(tmp_path):
    text = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n2F0,2F1,2B1,2B0\n"
    with pytest.raises(
        ValueError, match=r"line 2: 1B0 waits forever for 2B0 on line 3 behind 2F1, which waits for 1F1 "
    ):
        read(tmp_path, text, pp=3)
