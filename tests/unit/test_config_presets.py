"""The shipped configs: they load, follow every rule, and have the published sizes."""

import pytest

from megalite.config import presets
from megalite.config.load import check, dump, load_config
from megalite.config.presets import find_config, preset_dir, preset_names
from megalite.config.rules import problems
from megalite.config.schema import Config, Model
from megalite.config.source import parse, plain


def num_parameters(model: Model) -> int:
    """Logical parameters, counted from the shapes of the layers."""
    width, q, kv = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    norm = width * (2 if model.norm == "layernorm" else 1)
    in_sizes = [q, kv, kv] + [model.ffn_size] * (2 if model.activation == "swiglu" else 1)
    linear = sum(width * size for size in in_sizes) + q * width + model.ffn_size * width
    bias = sum(in_sizes) + 2 * width if model.bias else 0
    tables = model.vocab_size * (1 if model.tie_embeddings else 2)
    tables += model.max_seq_len if model.position == "learned" else 0
    return model.num_layers * (linear + bias + 2 * norm) + norm + tables * width


EXACT = {
    "gpt2_124m": (124_439_808, 8),  # the released weights
    "llama2_7b": (6_738_415_616, 32),
    "llama3_8b": (8_030_261_248, 64),
    "llama3_70b": (70_553_706_496, 512),
}
ROUNDED = {
    "gpt3_1.3b": (1.3e9, 0.05, 8),
    "gpt3_175b": (175e9, 0.005, 1024),
    "gpt_1t": (1008.0e9, 0.0001, 3072),  # table 1 of arXiv:2104.04473 gives four digits
}


def test_every_preset_is_known_here():
    assert set(preset_names()) == {*EXACT, *ROUNDED, "gpt_tiny_cpu"}


@pytest.mark.parametrize("name", preset_names())
def test_preset_loads_and_reloads(name):
    config = load_config(name)
    assert problems(config) == []
    assert check(plain(parse(dump(config), name=name)), {}, name=name) == config
    assert config.run.dir == f"runs/{name}"
    assert config.data.train


@pytest.mark.parametrize("name", EXACT)
def test_published_size(name):
    config = load_config(name)
    assert (num_parameters(config.model), config.world_size) == EXACT[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_published_size(name):
    config = load_config(name)
    published, tolerance, ranks = ROUNDED[name]
    assert num_parameters(config.model) == pytest.approx(published, rel=tolerance)
    assert config.world_size == ranks


@pytest.mark.parametrize("name", ["llama3_70b", "gpt3_175b", "gpt_1t"])
def test_large_layouts(name):
    """tp stays inside a node of 8, and stages are equal."""
    config = load_config(name)
    assert config.mesh.tp == 8
    assert len({end - start for start, end in config.stage_layers}) == 1


def test_the_tiny_preset_uses_every_axis():
    config = load_config("gpt_tiny_cpu")
    assert (config.mesh.pp, config.dp, config.mesh.tp, config.pipeline.virtual, config.zero.stage) == (2, 2, 2, 2, 3)
    assert config.pipeline.schedule == "interleaved"
    assert config.sequence_parallel
    assert [source.path for source in config.data.train] == ["builtin:docs"]


def test_the_tiny_preset_on_one_rank():
    config = load_config("gpt_tiny_cpu", ["mesh.tp=1", "mesh.pp=1", "mesh.dp=1"])
    assert isinstance(config, Config)
    assert config.world_size == 1


def test_a_file_wins_over_a_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config("gpt2_124m") == preset_dir() / "gpt2_124m.yaml"
    (tmp_path / "gpt2_124m").mkdir()
    assert find_config("gpt2_124m") == preset_dir() / "gpt2_124m.yaml"
    (tmp_path / "gpt3_1.3b").write_text("")
    assert str(find_config("gpt3_1.3b")) == "gpt3_1.3b"


def test_an_installed_package_has_its_own_presets(tmp_path, monkeypatch):
    monkeypatch.setattr(presets, "PACKAGE", tmp_path / "megalite")
    assert preset_dir() == tmp_path / "configs"
    (tmp_path / "megalite" / "presets").mkdir(parents=True)
    (tmp_path / "megalite" / "presets" / "mine.yaml").write_text("")
    assert preset_names() == ["mine"]
