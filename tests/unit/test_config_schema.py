"""Values that follow from others, and that nothing can be changed or left undocumented."""

import pytest
from pydantic import ValidationError

from megalite.config.errors import json_schema
from megalite.config.schema import Batch, Config, MeshSection, Model, Pipeline, Zero

SHAPE = {"num_layers": 10, "hidden_size": 192, "num_heads": 6, "vocab_size": 101, "max_seq_len": 64}


def config(**sections) -> Config:
    batch = sections.pop("batch", {"micro_batch_size": 2, "num_microbatches": 4})
    return Config(model=sections.pop("model", SHAPE), batch=batch, **sections)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("gpt", ("layernorm", "gelu", "learned", True, True, 768)),
        ("gpt2", ("layernorm", "gelu", "learned", True, True, 768)),
        ("llama", ("rmsnorm", "swiglu", "rope", False, False, 512)),
        ("llama3", ("rmsnorm", "swiglu", "rope", False, False, 512)),
    ],
)
def test_family_defaults(family, expected):
    model = Model(family=family, **SHAPE)
    found = (model.norm, model.activation, model.position, model.bias, model.tie_embeddings, model.ffn_size)
    assert found == expected
    assert model.family in ("gpt", "llama")
    assert (model.num_kv_heads, model.head_dim) == (6, 32)


def test_what_is_given_wins_over_the_family():
    given = {"num_kv_heads": 2, "head_dim": 16, "ffn_size": 100, "bias": True, "tie_embeddings": True}
    model = Model(family="llama", norm="layernorm", activation="gelu", position="learned", **given, **SHAPE)
    assert {name: getattr(model, name) for name in given} == given
    assert (model.norm, model.activation, model.position) == ("layernorm", "gelu", "learned")


@pytest.mark.parametrize("hidden_size", [4096, 8192, 96, 97])
def test_default_llama_ffn_is_the_next_multiple_of_256(hidden_size):
    size = Model(**(SHAPE | {"hidden_size": hidden_size})).ffn_size
    assert size % 256 == 0
    assert size - 256 < 8 * hidden_size / 3 <= size


@pytest.mark.parametrize(
    "given",
    [
        {"micro_batch_size": 2, "num_microbatches": 4},
        {"micro_batch_size": 2, "global_batch_size": 24},
        {"num_microbatches": 4, "global_batch_size": 24},
        {"micro_batch_size": 2, "num_microbatches": 4, "global_batch_size": 24},
    ],
)
def test_the_third_batch_size_follows(given):
    batch = config(batch=given, mesh={"dp": 3}).batch
    assert (batch.global_batch_size, batch.micro_batch_size, batch.num_microbatches, batch.seq_len) == (24, 2, 4, 64)


@pytest.mark.parametrize(("stage", "expected"), [(0, "step"), (1, "step"), (2, "microbatch"), (3, "microbatch")])
def test_reduce_each_follows_the_stage(stage, expected):
    assert Zero(stage=stage).reduce_each == expected
    assert Zero(stage=2, reduce_each="step").reduce_each == "step"


def test_mesh_sizes():
    split = config(mesh={"pp": 5, "tp": 2, "dp": {"replicate": 2, "shard": 3}})
    assert (split.dp, split.dp_replicate, split.dp_shard, split.world_size) == (6, 2, 3, 60)
    plain = config(mesh={"dp": 6})
    assert (plain.dp, plain.dp_replicate, plain.dp_shard, plain.world_size) == (6, 1, 6, 6)


def test_tp_sizes():
    assert config(mesh={"tp": 4}).padded_vocab == 104
    assert config().padded_vocab == 101
    model = SHAPE | {"num_kv_heads": 2}
    assert [config(mesh={"tp": tp}, model=model).kv_replicas for tp in (1, 2, 4, 6)] == [1, 1, 2, 3]
    assert not config(mesh={"tp": 1}).sequence_parallel
    assert config(mesh={"tp": 2}).sequence_parallel
    assert not config(mesh={"tp": 2, "sequence_parallel": False}).sequence_parallel


@pytest.mark.parametrize(
    ("pp", "virtual", "sizes"),
    [
        (1, 1, [10]),
        (2, 1, [5, 5]),
        (3, 1, [3, 4, 3]),
        (4, 1, [2, 3, 3, 2]),
        (2, 3, [1, 2, 2, 2, 2, 1]),
        (7, 1, [1, 2, 2, 2, 1, 1, 1]),
        (2, 5, [1] * 10),
    ],
)
def test_default_stages(pp, virtual, sizes):
    made = config(mesh={"pp": pp}, pipeline={"schedule": "interleaved", "virtual": virtual})
    assert [end - start for start, end in made.stage_layers] == sizes
    assert made.num_stages == len(sizes)
    flat = [layer for start, end in made.stage_layers for layer in range(start, end)]
    assert flat == list(range(10))


@pytest.mark.parametrize(("layers", "stages"), [(5, 3), (11, 4), (7, 4), (9, 5)])
def test_only_the_last_stage_to_choose_gets_no_extra_block(layers, stages):
    sizes = [b - a for a, b in config(model=SHAPE | {"num_layers": layers}, mesh={"pp": stages}).stage_layers]
    assert sum(sizes) == layers
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)


def test_explicit_stages():
    made = config(mesh={"pp": 3}, pipeline={"layers": [0, 7, 3]})
    assert made.stage_layers == ((0, 0), (0, 7), (7, 10))


def test_frozen():
    made = config()
    with pytest.raises(ValidationError):
        made.recompute = "full"
    with pytest.raises(ValidationError):
        made.batch.seq_len = 1


def test_sections_may_be_given_as_objects():
    made = Config(model=Model(**SHAPE), batch=Batch(micro_batch_size=2, num_microbatches=4), mesh=MeshSection(dp=2))
    assert made == config(mesh={"dp": 2})
    assert Pipeline(layers=[1, 2]).layers == (1, 2)


@pytest.mark.parametrize(
    ("section", "value"),
    [
        ("mesh", {"tp": True}),
        ("mesh", {"tp": "2"}),
        ("mesh", {"tp": 2.5}),
        ("mesh", {"sequence_parallel": 1}),
        ("lr", {"peak": "3e-4"}),
        ("lr", {"peak": True}),
        ("lr", {"peak": float("nan")}),
        ("optimizer", {"betas": (0.9, 1.0)}),
        ("optimizer", {"clip_norm": float("inf")}),
        ("zero", {"stage": 4}),
        ("run", {"seed": 2**63}),
        ("run", {"seed": -1}),
        ("data", {"split": [1, -1, 0]}),
        ("data", {"train": [{"path": "x", "weight": 0}]}),
        ("model", SHAPE | {"dropout": 1.0}),
    ],
)
def test_refused_values(section, value):
    base = {"model": SHAPE, "batch": {"micro_batch_size": 2, "num_microbatches": 4}}
    Config(**base)
    with pytest.raises(ValidationError):
        Config(**(base | {section: value}))


def test_every_field_has_a_description():
    schema = json_schema()
    sections = {"Config": schema} | schema["$defs"]
    missing = [
        f"{name}.{field}"
        for name, section in sections.items()
        for field, node in section.get("properties", {}).items()
        if not (node.get("description") or schema["$defs"][node["$ref"].rpartition("/")[2]].get("description"))
    ]
    assert len(sections) > 12
    assert missing == []
