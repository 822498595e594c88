"""The drawings: an exact text grid, a PNG that shows every action, and the command that prints both."""

from fractions import Fraction

import pytest

from megalite.parallel.pp import draw
from megalite.parallel.pp.command import schedule_command
from megalite.parallel.pp.draw import text_grid, write_png
from megalite.parallel.pp.schedules import build_schedule
from megalite.parallel.pp.simulate import simulate


def timeline(kind="1f1b", virtual=1, m=2, **costs):
    schedule = build_schedule(kind, pp=2, virtual=virtual, num_microbatches=m)
    return schedule, simulate(schedule, **{"forward_s": 1, "backward_s": 2, "send_s": 0, **costs})


def test_text_grid_is_exact():
    assert text_grid(timeline()[1]) == (
        "time   0   1   2   3   4   5   6   7   8\n"
        "rank 0 0F0 0F1 .   .   0B0 === .   0B1 ===\n"
        "rank 1 .   1F0 1B0 === 1F1 1B1 === .   .\n"
    )


def test_long_grids_are_cut_into_blocks_of_equal_width():
    blocks = text_grid(timeline()[1], columns=30).split("\n\n")
    assert [block.splitlines()[0] for block in blocks] == ["time   0   1   2   3   4", "time   5   6   7   8"]
    assert all(len(line) <= 30 for block in blocks for line in block.splitlines())
    assert text_grid(timeline()[1], columns=1).count("time") == 9


def test_markup_colours_by_op_and_changes_nothing_else():
    marked = text_grid(timeline()[1], markup=True)
    assert "[cyan]0F0[/]" in marked
    assert "[green]1B0[/] [green]===[/]" in marked
    plain = marked.replace("[cyan]", "").replace("[green]", "").replace("[/]", "")
    assert plain == text_grid(timeline()[1])


def test_text_grid_needs_whole_times():
    with pytest.raises(ValueError, match="0F0 runs from 0 to 1/2"):
        text_grid(timeline(forward_s=Fraction(1, 2))[1])


@pytest.mark.parametrize(("kind", "virtual", "m"), [("gpipe", 1, 1), ("1f1b", 1, 5), ("interleaved", 3, 4)])
def test_png_has_a_bar_per_action(tmp_path, monkeypatch, kind, virtual, m):
    schedule, played = timeline(kind, virtual, m)
    bars = []
    original = draw._draw_bar
    monkeypatch.setattr(draw, "_draw_bar", lambda *args, **kw: (bars.append(args[1:4]), original(*args, **kw)))
    write_png(schedule, played, tmp_path / "s.png")
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert [span for _, span, _ in bars] == [span for row in played.spans for span in row]
    colours = {(span.action.op, span.action.stage // 2): colour for _, span, colour in bars}
    assert len(set(colours.values())) == 2 * virtual


def test_command_prints_grid_and_numbers_and_writes_the_picture(tmp_path):
    text = schedule_command("1f1b", pp=4, virtual=1, num_microbatches=6, png=str(tmp_path / "s.png"))
    lines = text.splitlines()
    assert lines[0] == "1f1b: 4 stages on 4 ranks, 6 microbatches"
    assert "bubble: 33.3% of the step is idle (50.0% of the work)" in lines
    assert "peak live activations per rank: 4  3  2  1" in lines
    assert "messages per rank:              12  24  24  12" in lines
    assert lines[-1] == f"picture: {tmp_path / 's.png'}"
    assert (tmp_path / "s.png").stat().st_size > 1000


def test_command_without_picture_and_with_bad_sizes():
    text = schedule_command("gpipe", pp=1, virtual=1, num_microbatches=1, png=None)
    assert text.startswith("gpipe: 1 stage on 1 rank, 1 microbatch\n")
    assert "picture" not in text
    with pytest.raises(ValueError, match="num_microbatches=3"):
        schedule_command("interleaved", pp=2, virtual=2, num_microbatches=3, png=None)
