"""A schedule from a file: what is written is what is read, and every mistake is named with file and line."""

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
    "word": (GOOD.replace("1F1", "1X1"), r"own\.csv, line 2: action '1X1'"),
    "message": (GOOD.replace("0F1", "0F1,0SEND_F1"), "line 1: 0SEND_F1 is not F, B, I or W"),
    "lines": ("0F0,0B0\n", r"own\.csv has 1 lines, one per pp rank, but mesh\.pp=2; use mesh\.pp=1"),
    "empty line": ("0F0,0B0\n\n1F0,1B0\n", r"own\.csv has 3 lines"),
    "microbatches": ("0F0,0B0\n1F0,1B0\n", r"moves 1 microbatches, but batch\.num_microbatches=2"),
    "stage twice": (GOOD.replace("1F1", "0F1"), "line 2: 0F1, but stage 0 is on line 1"),
    "stages per rank": (GOOD.replace("0B1", "0B1,2F0,2B0"), r"line 1: 2 stages \(0, 2\), but pipeline\.virtual=1"),
    "no stage": ("0F0,0B0,0F1,0B1\n2F0,2B0,2F1,2B1\n", "stage 1 is on no line, but stage 2 is"),
    "twice": (GOOD.replace("0B1", "0B1,0F0"), "line 1: 0F0 after 0F0, 0B0"),
    "no forward": (GOOD.replace("1F1,", ""), "line 2: 1I1 after nothing of it"),
    "weight first": (GOOD.replace("1I1,1W1", "1W1,1I1"), "line 2: 1W1 after 1F1"),
    "both backwards": (GOOD.replace("1W1", "1B1"), "line 2: 1B1 after 1F1, 1I1"),
    "no backward": (GOOD.replace(",0B1", ""), "line 1: 0B1 is missing"),
    "no weight gradient": (GOOD.replace(",1W1", ""), "line 2: 1W1 is missing"),
    "no microbatch": (GOOD.replace("0F1,0B0,0B1", "0B0"), "line 1: 0F1 is missing; the file has 2 microbatches"),
    "waits forever": ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "line 1: 0B0 waits forever for 1B0 or 1I0"),
    "not text": ("0F0,0\u00dc0\n", "is not a text file of pipeline actions"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_mistakes_are_named_with_file_and_line(tmp_path, fault):
    text, message = FAULTS[fault]
    with pytest.raises(ValueError, match=message) as error:
        read(tmp_path, text)
    assert "own.csv" in str(error.value)


def test_a_missing_file_is_the_users_mistake(tmp_path):
    with pytest.raises(ValueError, match=r"pipeline\.schedule=.*none\.csv can't be read: No such file"):
        build_schedule(str(tmp_path / "none.csv"), pp=2, virtual=1, num_microbatches=2)
