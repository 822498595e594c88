"""The drawings: an exact text grid, a PNG that shows every action, and the command that prints both."""

import re
from fractions import Fraction

import pytest
from matplotlib.colors import to_hex

from megalite.parallel.pp import draw
from megalite.parallel.pp.command import Outputs, schedule_command
from megalite.parallel.pp.draw import text_grid, write_picture
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


FIRST_BYTES = {"png": b"\x89PNG\r\n", "svg": b"<?xml"}
KINDS = [("gpipe", 1, 1, "png"), ("1f1b", 1, 5, "svg"), ("interleaved", 3, 4, "png"), ("zbv", 2, 4, "svg")]


@pytest.mark.parametrize(("kind", "virtual", "m", "form"), KINDS)
def test_picture_has_a_bar_per_action(tmp_path, monkeypatch, kind, virtual, m, form):
    schedule, played = timeline(kind, virtual, m)
    bars, artists = [], []
    original = draw.draw_bars

    def keep(axes, found, **options):
        numbered = original(axes, found, **options)
        bars.extend(found)
        artists.extend(axes.collections)
        return numbered

    monkeypatch.setattr(draw, "draw_bars", keep)
    write_picture(schedule, played, tmp_path / "picture", form=form)
    assert (tmp_path / "picture").read_bytes().startswith(FIRST_BYTES[form])
    (artist,) = artists
    drawn = [path.get_extents() for path in artist.get_paths()]
    assert [(box.x0, box.x1, box.y0, box.y1) for box in drawn] == [
        (bar.start, bar.start + bar.length, bar.row - 0.43, bar.row + 0.43) for bar in bars
    ]
    assert [to_hex(colour) for colour in artist.get_facecolors()] == [bar.colour for bar in bars]
    spans = [(rank, span) for rank, row in enumerate(played.spans) for span in row]
    assert [(bar.row, bar.start, bar.start + bar.length, bar.text) for bar in bars] == [
        (rank, span.start_s, span.end_s, str(span.action.mb)) for rank, span in spans
    ]
    colours = {(span.action.op, span.action.stage // 2): bar.colour for bar, (_, span) in zip(bars, spans, strict=True)}
    assert len(set(colours.values())) == len({span.action.op for _, span in spans}) * virtual


def test_command_prints_grid_and_numbers_and_writes_files(tmp_path):
    outputs = Outputs(**{name: str(tmp_path / f"s.{name}") for name in ("png", "svg", "trace")})
    text = schedule_command("1f1b", pp=4, virtual=1, num_microbatches=6, outputs=outputs)
    lines = text.splitlines()
    assert lines[0] == "1f1b: 4 stages on 4 ranks, 6 microbatches"
    assert "step: 27 units of time: compute 66.7%, bubble 33.3%, exposed communication 0.0%" in lines
    assert (
        "idle: bubble and exposed communication, 33.3% of the step or 50.0% of the computation; 33.3% between a rank's "
        "first and last action"
    ) in lines
    assert "peak live activations per rank: 4  3  2  1" in lines
    assert "messages per rank:              12  24  24  12" in lines
    assert lines[-3:] == [f"{name}: {tmp_path / f's.{name}'}" for name in ("png", "svg", "trace")]
    assert all(len((tmp_path / f"s.{name}").read_bytes()) > 1000 for name in ("png", "svg", "trace"))


def test_command_tells_bubble_from_exposed_communication():
    """One microbatch over 2 ranks: 2 forwards and 2 backwards of 5 in a row, and 2 messages of 1: 12 of 2 * 6 busy."""
    text = schedule_command("1f1b", pp=2, virtual=None, num_microbatches=1, costs="2,2,1,1", outputs=Outputs())
    assert "step: 12 units of time: compute 41.7%, bubble 41.6%, exposed communication 16.7%" in text.splitlines()
    assert "idle: bubble and exposed communication, 58.3% of the step" in text


@pytest.mark.parametrize("costs", ["1,1,1,0", "2,2,1,1", "3,1,2,2", "1,1,1,7"])
@pytest.mark.parametrize("kind", ["1f1b", "zb_h1", "interleaved"])
def test_shares_add_up_and_the_picture_says_the_same(tmp_path, costs, kind):
    outputs = Outputs(svg=str(tmp_path / "s.svg"))
    text = schedule_command(kind, pp=2, virtual=None, num_microbatches=4, costs=costs, outputs=outputs)
    shares = re.search(r"compute (.*)%, bubble (.*)%, exposed communication (.*)%", text)
    compute, bubble, exposed = map(Fraction, shares.groups())
    idle = re.search("idle: bubble and exposed communication, (.*)% of the step", text)
    assert (compute + bubble + exposed, bubble + exposed) == (100, Fraction(idle[1]))
    assert min(compute, bubble, exposed) >= 0
    assert "-0.0" not in text
    assert f"<!-- {shares[0]} -->" in (tmp_path / "s.svg").read_text()


def test_numbers_are_left_out_where_bars_are_narrow(tmp_path):
    """Number 10 stands on an F, an I and a W of two ranks; where no bar has a number, the label speaks of none."""
    said = {}
    for costs, m in [("400,400,400,0", 11), ("1,1,400,0", 11), ("1,1,1,0", 400)]:
        outputs = Outputs(svg=str(tmp_path / "s.svg"))
        schedule_command("zb_h1", pp=2, virtual=None, num_microbatches=m, costs=costs, outputs=outputs)
        texts = re.findall("<!-- (.*) -->", (tmp_path / "s.svg").read_text())
        said[costs] = (texts.count("10"), any("the numbers are microbatches" in text for text in texts))
    assert list(said.values()) == [(6, True), (2, True), (0, False)]


def test_command_names_its_own_options(tmp_path):
    """What a config calls mesh.pp is --pp here."""
    file = tmp_path / "own.csv"
    file.write_text("0F0,0B0\n")
    for kind, sizes, words in [
        (
            "1f1b",
            (2, 2, 2),
            "--kind=1f1b takes one chunk per rank, not --virtual=2 at --pp=2; use --virtual=1 or --kind=",
        ),
        ("interleaved", (2, 2, 3), "--microbatches=3 is not a multiple of --pp=2, which --kind=interleaved needs"),
        ("none", (2, 2, 3), "--kind=none is unknown"),
        ("none.csv", (2, 2, 3), "--kind=none.csv can't be read"),
        (str(file), (2, 1, 1), "1 line, one per pp rank, but --pp=2; use --pp=1 or another file"),
        (str(file), (1, 2, 1), "1 stage (0), but --virtual=2; every line has as many stages: use --virtual=1"),
        (str(file), (1, 1, 4), "1 microbatch, but --microbatches=4; use --microbatches=1"),
    ]:
        pp, virtual, num_microbatches = sizes
        with pytest.raises(ValueError, match=re.escape(words)) as error:
            schedule_command(kind, pp=pp, virtual=virtual, num_microbatches=num_microbatches, outputs=Outputs())
        assert not re.search(r"(mesh|batch|pipeline)\.", str(error.value))


def test_command_takes_the_chunks_that_a_kind_needs():
    text = schedule_command("zbv", pp=4, virtual=None, num_microbatches=8, outputs=Outputs())
    assert text.startswith("zbv: 8 stages on 4 ranks, 8 microbatches\n")
    assert "or 6.2% of the computation; 0.0% between a rank's first and last action" in text
    assert schedule_command("interleaved", pp=2, virtual=None, num_microbatches=2, outputs=Outputs()).startswith(
        "interleaved: 4 stages on 2 ranks"
    )


def test_command_makes_zb_h2_for_the_costs():
    """With slow messages the schedule for equal costs idles more than the one that is made for these."""
    text = schedule_command("zb_h2", pp=4, virtual=None, num_microbatches=24, costs="2,2,1,1", outputs=Outputs())
    made, equal = (build_schedule("zb_h2", pp=4, virtual=1, num_microbatches=24, costs=c) for c in ((2, 2, 1, 1), None))
    lengths = {"forward_s": 2, "input_s": 2, "weight_s": 1, "send_s": 1}
    spans = [simulate(schedule, **lengths).makespan_s for schedule in (made, equal)]
    assert spans[0] < spans[1]
    assert f"step: {spans[0]} units of time" in text


def test_command_without_files_and_with_bad_sizes_and_costs():
    text = schedule_command("gpipe", pp=1, virtual=1, num_microbatches=1, outputs=Outputs())
    assert text.startswith("gpipe: 1 stage on 1 rank, 1 microbatch\n")
    assert "png" not in text
    with pytest.raises(ValueError, match="--microbatches=3"):
        schedule_command("interleaved", pp=2, virtual=2, num_microbatches=3, outputs=Outputs())
    for costs in ("1,1,1", "1,1,1,x", "0,1,1,0", "1,1,1.5,0", "1,1,-1,0"):
        with pytest.raises(ValueError, match=f"--costs={costs} must be four whole numbers"):
            schedule_command("gpipe", pp=1, virtual=1, num_microbatches=1, costs=costs, outputs=Outputs())
