"""Files, `extends`, overrides, origins and errors: what a user writes becomes a config, or one message that helps."""

import re

import pytest

from megalite.config.errors import ConfigError
from megalite.config.load import Loaded, check, dump, load, load_config
from megalite.config.schema import Config
from megalite.config.show import FOLLOWS, rows, show
from megalite.config.source import parse, plain

BASE = """\
model: {num_layers: 4, hidden_size: 64, num_heads: 4, ffn_size: 96, vocab_size: 50, max_seq_len: 32}
batch:
  global_batch_size: 8
  micro_batch_size: 2
lr: {peak: 1e-4, warmup_steps: 2}
"""


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE)
    return tmp_path


def refused(path, *overrides) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.problems


def test_a_file(base):
    config = load_config("base.yaml")
    assert (config.model.num_layers, config.batch.num_microbatches, config.lr.peak) == (4, 4, 1e-4)
    assert load_config(base / "base.yaml") == config


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        ("-2e+3", -2000.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("12", 12),
        ("1_000", 1000),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("'1e-4'", "1e-4"),
        ("1f1b", "1f1b"),
        ("e5", "e5"),
        ("1e", "1e"),
        ("[1e-8, {a: 2e-1}]", [1e-8, {"a": 0.2}]),
        (".inf", float("inf")),
    ],
)
def test_scalars(text, value):
    found = plain(parse(f"x: {text}", name="t"))["x"]
    assert found == value
    assert type(found) is type(value)


def test_overrides(base):
    config = load_config(
        "base.yaml",
        [
            "mesh.tp=2",
            "lr.peak=3e-4",
            "optimizer.eps=1e-8",
            "data.train=[{path: builtin:docs, weight: 2}, {path: b}]",
            "mesh.dp={replicate: 2, shard: 2}",
            "recompute=full",
            "optimizer.betas=[0.8, 9e-1]",
            "batch.micro_batch_size=null",
            "batch.num_microbatches=2",
            "run.dir=runs/a=b",
            "mesh.tp=4",
        ],
    )
    assert (config.mesh.tp, config.dp, config.world_size) == (4, 4, 16)
    assert (config.lr.peak, config.optimizer.eps, config.optimizer.betas) == (3e-4, 1e-8, (0.8, 0.9))
    assert [(s.path, s.weight) for s in config.data.train] == [("builtin:docs", 2.0), ("b", 1.0)]
    assert (config.recompute, config.run.dir, config.batch.micro_batch_size) == ("full", "runs/a=b", 1)


def test_an_override_of_a_section_keeps_its_other_keys(base):
    config = load_config("base.yaml", ["lr={warmup_steps: 3}", "mesh.dp.shard=2"])
    assert (config.lr.peak, config.lr.warmup_steps, config.dp_shard) == (1e-4, 3, 2)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("mesh.tp", "override 'mesh.tp' is not key=value; write e.g. mesh.tp=4"),
        ("=4", "override '=4' is not key=value; write e.g. mesh.tp=4"),
        ("mesh..tp=4", "override 'mesh..tp=4' is not key=value; write e.g. mesh.tp=4"),
        (
            "lr.peak.x=4",
            "override 'lr.peak.x=4': lr.peak=0.0001 has no keys; give the whole value, lr.peak=...",
        ),
    ],
)
def test_bad_overrides(base, override, message):
    assert refused("base.yaml", override) == [message]


def test_an_override_that_is_not_yaml(base):
    (problem,) = refused("base.yaml", "data.train=[{path: x}")
    assert problem.startswith("override 'data.train=[{path: x}': the value is not valid YAML: ")


def test_extends(base):
    (base / "sub").mkdir()
    (base / "sub" / "a.yaml").write_text("extends: ../base.yaml\nlr: {warmup_steps: 5}\nmesh: {dp: {shard: 2}}\n")
    (base / "b.yaml").write_text("extends: sub/a.yaml\nmesh: {dp: 4}\n")
    config = load_config("b.yaml")
    assert (config.lr.peak, config.lr.warmup_steps, config.dp) == (1e-4, 5, 4)


def test_extends_a_preset(base):
    (base / "a.yaml").write_text("extends: gpt2_124m\nrun: {steps: 3000}\n")
    assert load_config("a.yaml").model == load_config("gpt2_124m").model
    assert load_config("a.yaml").run.steps == 3000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: a.yaml", "a.yaml: extends comes back to itself: a.yaml -> a.yaml; remove one of the extends"),
        ("extends: [x, y]", "a.yaml: extends must be one file or preset; use extends: other.yaml"),
        ("extends: {x: y}", "a.yaml: extends must be one file or preset; use extends: other.yaml"),
    ],
)
def test_bad_extends(base, text, message):
    (base / "a.yaml").write_text(text)
    assert refused("a.yaml") == [message]


def test_extends_in_a_circle_of_two(base):
    (base / "a.yaml").write_text("extends: b.yaml")
    (base / "b.yaml").write_text("extends: a.yaml")
    assert refused("a.yaml") == [
        "a.yaml: extends comes back to itself: a.yaml -> b.yaml -> a.yaml; remove one of the extends"
    ]


def test_extends_a_missing_file(base):
    (base / "a.yaml").write_text("\nextends: gpt2_124\n")
    assert refused("a.yaml") == [
        "a.yaml:2: extends=gpt2_124: no such file; give a YAML file or a preset (gpt2_124m, gpt_1t)"
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"x.yaml: is empty; a config needs at least the sections model and batch"),
        (b"# only a comment\n", r"x.yaml: is empty; .*"),
        (b"\n- a\n", r"x.yaml:2: a config is a mapping of sections, e.g. model: {...}"),
        (b"just text", r"x.yaml:1: a config is a mapping .*"),
        (b"model: {\nx: [}", r"x.yaml:2: not valid YAML: .*"),
        (b"a: 1\n b: 2", r"x.yaml:2: not valid YAML: .*"),
        (b"a: 1\n---\nb: 2", r"x.yaml:2: not valid YAML: .*"),
        (b"\x93NUMPY\x01\x00v\x00", r"x.yaml: byte 0 is not UTF-8; give a YAML text file"),
        (b"\x7fELF\x02\x01\x00\x00", r"x.yaml: not valid YAML: .*"),
        (b"a: 1\nmesh:\n  tp: 2\n  dp: 2\n  tp: 4\n", r"x.yaml:5: tp is given twice, first in line 3; remove one"),
        (b"mesh: {}\nlr: {}\nmesh: {}", r"x.yaml:3: mesh is given twice, first in line 1; remove one"),
        (b"data: {train: [{path: a, path: b}]}", r"x.yaml:1: path is given twice, first in line 1; remove one"),
        (b"[a, b]: 1", r"x.yaml:1: a key must be a name"),
        (b"a: !!python/object:os.system x", r"x.yaml:1: x: the tag .* is not allowed"),
        (b"a: &a [*a]", r"x.yaml:1: an alias that contains itself, or too many values for a config"),
        (b"a: &a {b: *a}", r"x.yaml:1: an alias that contains itself, .*"),
        (b"a: " + b"[" * 1000, r"x.yaml.* not valid YAML: .*"),
        (b"a: " + b"9" * 5000, r"x.yaml:1: 9{60}: .*"),
        (b"a: *nowhere", r"x.yaml:1: not valid YAML: .*"),
        (b"#" * 1_000_001, r"x.yaml: 1000001 bytes is too large for a config; give a YAML file"),
    ],
)
def test_bad_files(base, content, message):
    (base / "x.yaml").write_bytes(content)
    (problem,) = refused("x.yaml")
    assert re.fullmatch(message, problem), problem
    assert "\n" not in problem


def test_aliases_that_multiply(base):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    (base / "x.yaml").write_text("\n".join(lines))
    (problem,) = refused("x.yaml")
    assert problem.endswith("too many values for a config")


def test_missing_file_and_folder(base):
    assert refused("nope.yaml")[0].startswith("nope.yaml: no such file; give a YAML file or a preset (gpt2_124m, ")
    assert refused("gpt_tiny_cp") == ["gpt_tiny_cp: no such file; give a YAML file or a preset (gpt_tiny_cpu)"]
    assert refused(".") == [".: is a folder; give a YAML file"]


BAD_VALUES = [
    ("lr.peak=-1", "lr.peak=-1 must be a number >= 0", "use e.g. 0.0003 (the default)"),
    ("lr.peak=.nan", "lr.peak=nan must be a number >= 0", "use e.g. 0.0003 (the default)"),
    ("mesh.tp=0", "mesh.tp=0 must be a whole number > 0", "use e.g. 1 (the default)"),
    ("mesh.tp=two", "mesh.tp=two must be a whole number > 0", "use e.g. 1 (the default)"),
    ("mesh.tp=2.5", "mesh.tp=2.5 must be a whole number > 0", "use e.g. 1 (the default)"),
    ("mesh.tp=true", "mesh.tp=true must be a whole number > 0", "use e.g. 1 (the default)"),
    ("mesh.tp=", "mesh.tp=null must be a whole number > 0", "use e.g. 1 (the default)"),
    ("model.num_layers=0", "model.num_layers=0 must be a whole number > 0", "use 1 or more"),
    ("run.dir=5", "run.dir=5 must be a text", "use e.g. runs/default (the default)"),
    ("zero.stage=4", "zero.stage=4 must be 0, 1, 2 or 3", "use e.g. 1 (the default)"),
    ("zero.offload_optimizer=x", "zero.offload_optimizer=x must be none or cpu", "use e.g. none (the default)"),
    ("optimizer.name=adam", "optimizer.name=adam must be adamw or sgd", "did you mean adamw?"),
    (
        "recompute=ful",
        "recompute=ful must be none, selective or full or a list, each a mapping with the keys layers, ops",
        "did you mean full?",
    ),
    (
        "recompute=[{layers: [0, 1], ops: mlpp}]",
        "recompute[0].ops[0]=mlpp must be attention, activation, mlp or full",
        "did you mean mlp?",
    ),
    ("model.bias=yes", "model.bias=yes must be true or false", "leave it out for what follows from other fields"),
    ("mesh.dp={shard: 0}", "mesh.dp.shard=0 must be a whole number > 0", "use e.g. 1 (the default)"),
    (
        "mesh.dp=0",
        "mesh.dp=0 must be a whole number > 0 or a mapping with the keys replicate, shard",
        "use e.g. 1 (the default)",
    ),
    (
        "data.split=[1, 2]",
        "data.split=[1, 2] must be a list of 3, each a number >= 0",
        "use e.g. [969.0, 30.0, 1.0] (the default)",
    ),
    (
        "data.split=[1, x, 2]",
        "data.split[1]=x must be a number >= 0",
        "use e.g. [969.0, 30.0, 1.0] (the default)",
    ),
    (
        "data.train=docs",
        "data.train=docs must be a list, each a mapping with the keys path, weight",
        "use e.g. [] (the default)",
    ),
    (
        "optimizer.betas=[0.9, 0.9, 0.9]",
        "optimizer.betas=[0.9, 0.9, 0.9] must be a list of 2, each a number >= 0 and < 1",
        "use e.g. [0.9, 0.95] (the default)",
    ),
]


@pytest.mark.parametrize(("override", "rule", "way_out"), BAD_VALUES)
def test_bad_values(base, override, rule, way_out):
    assert refused("base.yaml", override) == [f"{rule}; {way_out} (override)"]


def test_missing_values(base):
    (base / "x.yaml").write_text("model: {num_layers: 2}\nbatch: {micro_batch_size: 1, num_microbatches: 1}\n")
    problems = refused("x.yaml")
    assert [text.split(" ")[0] for text in problems] == [
        "model.hidden_size", "model.num_heads", "model.vocab_size", "model.max_seq_len"
    ]  # fmt: skip
    assert problems[1] == "model.num_heads is missing; give a whole number > 0: Query heads"


def test_unknown_keys(base):
    assert refused("base.yaml", "tp=2") == ["tp is unknown; did you mean mesh.tp? (override)"]
    assert refused("base.yaml", "mesh.tpp=2") == ["mesh.tpp is unknown; did you mean mesh.tp or mesh.pp? (override)"]
    assert refused("base.yaml", "mesh.dp={shards: 2}") == [
        "mesh.dp.shards is unknown; did you mean mesh.dp.shard? (override)"
    ]
    assert refused("base.yaml", "meshes.tp=2")[0].startswith("meshes is unknown; did you mean mesh?")
    (base / "x.yaml").write_text(BASE + "mesh.tp: 2\n")
    assert refused("x.yaml") == ["mesh.tp is unknown; write the parts of mesh.tp as nested keys (x.yaml:6)"]
    (problem,) = refused("base.yaml", "comm.zzz=1")
    assert problem == "comm.zzz is unknown; comm has cpu_backend, cuda_backend (override)"


def test_every_problem_at_once(base):
    (base / "x.yaml").write_text(BASE + "mesh:\n  tp: 3\n  dpp: 2\nzero: 3\nrun: {steps: 0}\n")
    with pytest.raises(ConfigError) as caught:
        load_config("x.yaml", ["nonsense", "optimizer.name=adam", "optimizer.momentum=0.5"])
    text = str(caught.value)
    assert text.splitlines()[0] == "x.yaml: 7 problems"
    assert [line.strip().split(" ")[0] for line in text.splitlines()[1:]] == [
        "override", "mesh.dpp", "zero=3", "optimizer.name=adam", "run.steps=0", "mesh.tp=3", "mesh.tp=3",
    ]  # fmt: skip
    assert text.splitlines()[-2].endswith(
        "mesh.tp=3 does not divide model.num_heads=4; use 1, 2 or 4 (mesh.tp x.yaml:7, model.num_heads x.yaml:1)"
    )


def test_rules_do_not_speak_of_the_default_of_a_refused_value(base):
    (problem,) = refused("base.yaml", "run.steps=-5", "lr.schedule=wsd", "lr.decay_steps=5000")
    assert problem.startswith("run.steps=-5 must be")


def test_an_unknown_key_hides_no_rule(base):
    problems = refused("base.yaml", "l=1", "optimizer.momentum=0.5")
    assert [text.split(" ")[0] for text in problems] == ["l", "optimizer.momentum=0.5"]
    problems = refused("base.yaml", "lr.warm=1", "optimizer.momentum=0.5")
    assert [text.split(" ")[0] for text in problems] == ["lr.warm", "optimizer.momentum=0.5"]


def test_origins(base):
    (base / "x.yaml").write_text("extends: base.yaml\nmesh: {tp: 2}\n")
    loaded = load("x.yaml", ["lr.peak=1", "mesh.dp={replicate: 2}", "batch.num_microbatches=null"])
    found = {name: (value, at) for name, value, at in rows(loaded)}
    assert found["model.num_layers"] == ("4", "base.yaml:1")
    assert found["batch.micro_batch_size"] == ("2", "base.yaml:4")
    assert found["mesh.tp"] == ("2", "x.yaml:2")
    assert found["mesh.dp"] == ("{replicate: 2, shard: 1}", "override")
    assert found["lr.peak"] == ("1.0", "override")
    assert found["batch.num_microbatches"] == ("2", f"follows from {FOLLOWS['batch.num_microbatches']}")
    assert found["model.norm"] == ("rmsnorm", "follows from model.family")
    assert found["zero.reduce_each"] == ("step", "follows from zero.stage")
    assert found["run.seed"] == ("1234", "default")
    assert found["recompute"] == ("none", "default")
    assert found["world_size"] == ("4", "derived")


def test_what_follows_is_exactly_what_is_filled():
    """A field that is null by default and concrete after loading must say what it follows from, and no other."""
    model = {"num_layers": 2, "hidden_size": 8, "num_heads": 2, "vocab_size": 9, "max_seq_len": 8}
    config = Config(model=model, batch={"micro_batch_size": 1, "num_microbatches": 1})
    filled = {
        f"{name}.{field}"
        for name in Config.model_fields
        if hasattr(getattr(config, name), "model_fields_set")
        for field, info in type(getattr(config, name)).model_fields.items()
        if not info.is_required() and info.default is None and getattr(getattr(config, name), field) is not None
    }
    assert filled == set(FOLLOWS)


def test_show_plain_and_table(base):
    loaded = load("base.yaml")
    assert "model.num_layers = 4  # base.yaml:1" in show(loaded).splitlines()
    table = show(loaded, width=100)
    assert "model.num_layers" in table
    assert "base.yaml:1" in table
    assert max(map(len, re.sub(r"\x1b\[[0-9;]*m", "", table).splitlines())) <= 100


def reloaded(config: Config) -> Config:
    return check(plain(parse(dump(config), name="dump")), {}, name="dump")


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["mesh.dp={replicate: 2, shard: 2}", "zero.stage=3"],
        ["run.dir='1e-4'", "checkpoint.resume='no'"],
        ["run.dir='a: b #c'", "checkpoint.resume='null'"],
        ["model.rope_scaling={factor: 4}", "optimizer.eps=1e-30", "lr.peak=1.7976931348623157e+308"],
        ["pipeline.layers=[0, 4]", "mesh.pp=2", "data.train=[{path: x}, {path: '2', weight: 0.1}]"],
        ["model.family=gpt", "data.document_mask=true", "data.eod_id=3", "optimizer.decay=[]"],
    ],
)
def test_dump_reloads_equal(base, overrides):
    config = load_config("base.yaml", overrides)
    assert reloaded(config) == config
    assert dump(reloaded(config)) == dump(config)
    (base / "config.yaml").write_text(dump(config))
    assert load_config("config.yaml") == config


def test_dump_is_readable(base):
    lines = dump(load_config("base.yaml")).splitlines()
    assert "batch: {global_batch_size: 8, micro_batch_size: 2, num_microbatches: 4, seq_len: 32}" in lines
    assert max(map(len, lines)) < 140


def test_loaded_is_plain_data(base):
    loaded = load("base.yaml", ["mesh.tp=2"])
    assert isinstance(loaded, Loaded)
    assert loaded.origins["mesh.tp"] == "override"
