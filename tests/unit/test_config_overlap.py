"""The section `overlap`: forms that mean the same, and messages for what can't be or has no effect."""

import pytest

from megalite.config.errors import ConfigError
from megalite.config.load import check, dump, load, load_config
from megalite.config.overlap import overlap_sites
from tests.unit.model_tools import LLAMA, SIZES, make_config

BASE = {
    "model": SIZES | LLAMA,
    "mesh": {"tp": 2},
    "batch": {"global_batch_size": 2, "micro_batch_size": 1},
}


def overlap(section: dict, **mesh):
    return check(BASE | {"mesh": {"tp": 2} | mesh, "overlap": section}, {}, name="test").overlap


def config_of(section: dict, *, micro: int, seq_len: int = 16, **mesh):
    batch = {"global_batch_size": micro, "micro_batch_size": micro, "seq_len": seq_len}
    sections = {"batch": batch, "mesh": {"tp": 2} | mesh, "overlap": section}
    model = BASE["model"] | {"num_heads": 8, "num_kv_heads": 8, "head_dim": 8}
    return check(BASE | sections | {"model": model}, {}, name="test")


def write(path, text: str) -> str:
    path.write_text(dump(check(BASE, {}, name="test")).partition("overlap:")[0] + text, encoding="utf-8")
    return str(path)


def test_sites_may_be_nested_or_dotted_and_the_default_is_auto():
    dotted = overlap({"sites": {"mlp.down.backward": "none"}})
    assert overlap({"sites": {"mlp": {"down": {"backward": "none"}}}}) == dotted
    assert dotted.backend_of("mlp.down.backward") == "none"
    assert dotted.backend_of("mlp.down.forward") == "auto"
    assert overlap({"chunks": "auto"}) == overlap({})


def test_overrides_reach_sites_of_a_file_and_a_dump_loads_as_the_same(tmp_path):
    path = write(tmp_path / "a.yaml", "overlap: {sites: {mlp.down.backward: none, attention.out.forward: none}}\n")
    loaded = load(path, ["overlap.sites.mlp.down.backward=chunked", "overlap.chunks=2"])
    assert loaded.config.overlap.sites == {"mlp.down.backward": "chunked", "attention.out.forward": "none"}
    assert loaded.origins["overlap.sites.mlp.down.backward"] == "override"
    assert loaded.origins["overlap.sites.attention.out.forward"].startswith(path)
    again = tmp_path / "b.yaml"
    again.write_text(dump(loaded.config), encoding="utf-8")
    assert load_config(again) == loaded.config


def test_the_sites_are_those_of_the_model():
    gpt = overlap_sites("gelu")
    assert len(gpt) == 8
    assert "mlp.up.forward" in gpt
    assert overlap_sites("swiglu", gathers=False) == (
        "attention.qkv.backward", "attention.out.forward", "mlp.gate_up.backward", "mlp.down.forward",
    )  # fmt: skip


PLAIN = {"backend": "chunked"}
AUTO_PARTS = [
    (8, 16, {}, 4),
    (4, 16, {}, 4),
    (6, 16, {}, 2),
    (3, 16, {}, 1),
    (1, 16, {}, 1),
    (8, 3, {"tp": 4}, 2),  # four parts would have 6 rows, two have 12
    (4, 2, {"tp": 4}, 2),
    (4, 3, {"tp": 4}, 1),
    (4, 3, {"tp": 4, "sequence_parallel": False}, 4),
]


@pytest.mark.parametrize(("micro", "seq_len", "mesh", "parts"), AUTO_PARTS)
def test_chunked_takes_four_parts_or_two_where_they_fit(micro, seq_len, mesh, parts):
    assert config_of(PLAIN, micro=micro, seq_len=seq_len, **mesh).batch_parts == parts
    assert config_of(PLAIN | {"batch_parts": "auto"}, micro=micro, seq_len=seq_len, **mesh).batch_parts == parts


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"backend": "none"},
        {"backend": "symm"},
        PLAIN | {"chunks": 2},
        PLAIN | {"sites": {"mlp.down.forward": "none"}},
        PLAIN | {"batch_parts": 1},
        PLAIN | {"batch_parts": 1, "chunks": 2},
        {"backend": "none", "batch_parts": 1},
    ],
)
def test_a_microbatch_is_one_part_where_pieces_or_sites_are_given_or_nothing_is_chunked(section):
    assert config_of(section, micro=4).batch_parts == 1


@pytest.mark.parametrize("parts", [2, 3, 6])
def test_any_divisor_of_the_microbatch_may_be_given(parts):
    config = config_of(PLAIN | {"batch_parts": parts}, micro=6)
    assert config.batch_parts == parts
    assert config_of({}, micro=6, tp=1).batch_parts == 1


PROBLEMS = {
    "a word": ({"backend": "chunks"}, {}, "overlap.backend=chunks must be .*; did you mean chunked?"),
    "a site's word": (
        {"sites": {"mlp.down.forward": "on"}},
        {},
        r"overlap.sites.mlp.down.forward=on must be auto, none",
    ),
    "not a mapping": ({"sites": "none"}, {}, "overlap.sites=none must be a mapping of names, each to auto"),
    "no number": ({"chunks": "few"}, {}, "overlap.chunks=few must be a whole number > 0"),
    "no site": ({"sites": {"mlp.dwn.forward": "none"}}, {}, "names no site .* did you mean mlp.down.forward?"),
    "no such site": ({"sites": {"x": "none"}}, {}, "its sites are attention.qkv.forward, attention.qkv.backward"),
    "of gpt": ({"sites": {"mlp.up.forward": "none"}}, {}, "model.activation=swiglu; did you mean mlp.gate_up.forward"),
    "one rank": ({"backend": "chunked"}, {"tp": 1}, "overlap.backend=chunked has no effect with mesh.tp=1"),
    "one rank's pieces": ({"chunks": 2}, {"tp": 1}, "overlap.chunks=2 has no effect with mesh.tp=1"),
    "one rank's sites": (
        {"sites": {"mlp.down.forward": "none"}},
        {"tp": 1},
        "overlap.sites={mlp.down.forward: none} has",
    ),
    "no pieces": ({"backend": "none", "chunks": 2}, {}, "overlap.chunks=2 has no effect with overlap.backend=none"),
    "too many": ({"chunks": 9}, {}, "overlap.chunks=9 is more than the 8 rows of a rank's share .* use 8 or less"),
    "nothing sent": (
        {"sites": {"attention.qkv.forward": "chunked"}},
        {"sequence_parallel": False},
        "overlap.sites.attention.qkv.forward=chunked has no effect with mesh.sequence_parallel=false",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_problems_name_field_value_rule_and_way_out(name):
    section, mesh, message = PROBLEMS[name]
    with pytest.raises(ConfigError, match=message) as error:
        overlap(section, **mesh)
    assert len(error.value.problems) == 1


@pytest.mark.parametrize("section", [{}, {"backend": "none"}, {"backend": "auto"}])
def test_one_rank_takes_what_asks_for_nothing(section):
    overlap(section, tp=1)
    assert make_config(LLAMA, overlap=section).overlap.backend == section.get("backend", "auto")


WORD = "overlap.batch_parts=2"
PARTS_PROBLEMS = {
    "zero": (PLAIN | {"batch_parts": 0}, {}, "overlap.batch_parts=0 must be a whole number > 0; leave it out"),
    "negative": (PLAIN | {"batch_parts": -2}, {}, "overlap.batch_parts=-2 must be a whole number > 0"),
    "a word": (PLAIN | {"batch_parts": "two"}, {}, "overlap.batch_parts=two must be a whole number > 0"),
    "one rank": ({"backend": "none", "batch_parts": 2}, {"tp": 1}, f"{WORD} has no effect with mesh.tp=1"),
    "auto backend": ({"batch_parts": 2}, {}, f"{WORD} needs overlap.backend=chunked, but it is auto; set that, or"),
    "not chunked": (
        {"backend": "none", "batch_parts": 2},
        {},
        f"{WORD} needs .*, but it is none; .* leave batch_parts",
    ),
    "symm": ({"backend": "symm", "batch_parts": 2}, {}, f"{WORD} needs overlap.backend=chunked, but it is symm"),
    "pieces": (
        PLAIN | {"batch_parts": 2, "chunks": 2},
        {},
        f"overlap.chunks has no effect with {WORD}, which runs whole collectives; leave one of them out",
    ),
    "sites": (
        PLAIN | {"batch_parts": 2, "sites": {"mlp.down.forward": "none"}},
        {},
        f"overlap.sites has no effect with {WORD}, .* leave one of them out",
    ),
    "no divisor": (
        PLAIN | {"batch_parts": 4},
        {"micro": 6},
        "overlap.batch_parts=4 does not divide batch.micro_batch_size=6; use a divisor of it, or 1",
    ),
    "rows": (
        PLAIN | {"batch_parts": 2},
        {"micro": 2, "seq_len": 6, "tp": 4},
        f"{WORD}: the 6 rows of a part are not divisible by mesh.tp=4; use fewer parts, or mesh.sequence_parallel=fal",
    ),
}


@pytest.mark.parametrize("name", PARTS_PROBLEMS)
def test_problems_of_parts_name_field_value_rule_and_way_out(name):
    section, sizes, message = PARTS_PROBLEMS[name]
    with pytest.raises(ConfigError, match=message) as error:
        config_of(section, **{"micro": 4} | sizes)
    assert len(error.value.problems) == 1


def test_rows_that_are_not_shared_need_not_divide():
    config = config_of(PLAIN | {"batch_parts": 2}, micro=2, seq_len=3, tp=2, sequence_parallel=False)
    assert config.batch_parts == 2
