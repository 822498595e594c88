"""pipeline.layout: its grammar with columns in errors, what a config makes of it, and the balance of `auto`."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config.load import ConfigError, load_config
from megalite.config.pipeline import balanced_sizes, equal_sizes, parse_layout
from megalite.observe.flops import ModelShape, flops_per_token

CONFIG = (
    "model: {num_layers: 10, hidden_size: 32, num_heads: 4, vocab_size: 64, max_seq_len: 16}\n"
    "batch: {micro_batch_size: 1, num_microbatches: 4}\ndata: {train: [{path: x}]}\n"
)


def load(tmp_path, *overrides):
    (tmp_path / "c.yaml").write_text(CONFIG)
    return load_config(str(tmp_path / "c.yaml"), ["mesh.pp=4", *overrides])


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("E,2*B|3*B|3*B|2*B,H", (2, 3, 3, 2)),
        ("E,B,H", (1,)),
        ("E|B,B|12 * B|H", (0, 2, 12, 0)),
        (" E , 0*B | 0*B | B,2*B , H ", (0, 0, 3)),
    ],
)
def test_layouts_give_blocks_per_stage(text, sizes):
    assert parse_layout(text) == sizes


@pytest.mark.parametrize(
    ("text", "column", "why"),
    [
        ("E,2*B|3*X,H", 7, "'3\\*X' is not E, B, n\\*B or H"),
        ("E,B||B,H", 5, "nothing is not E, B"),
        ("E,B,|B,H", 5, "nothing is not E, B"),
        ("", 1, "nothing is not E, B"),
        ("E,2B|B,H", 3, "'2B' is not"),
        ("E,-1*B|B,H", 3, "'-1\\*B' is not"),
        ("E,B|E,B|B,H", 5, "E \\(the embedding\\) comes first"),
        ("B,E|B,H", 3, "E \\(the embedding\\) comes first"),
        ("E,B|H|B", 5, "H \\(the head\\) comes last"),
        ("E,B|H,  B", 5, "H \\(the head\\) comes last"),
        ("B|B,H", 1, "the first stage starts with E"),
        ("E,B|  B", 7, "the last stage ends with H"),
        ("2*E,B|B,H", 1, "there is one E; write E"),
        ("E,B|B,1*H", 7, "there is one H; write H"),
    ],
)
def test_mistakes_are_named_with_their_column(text, column, why):
    with pytest.raises(ValueError, match=f", column {column}: {why}"):
        parse_layout(text)


def test_a_config_takes_a_layout(tmp_path):
    config = load(tmp_path, "pipeline.layout='E,1*B|4*B|4*B|1*B,H'")
    assert config.stage_layers == ((0, 1), (1, 5), (5, 9), (9, 10))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pipeline.layout='E,10*B,H'"], r"E,10\*B,H has 1 stages, but mesh.pp \* pipeline.virtual = 4"),
        (["pipeline.layout='E,B|B|B|B,H'"], r"has 4 blocks, not model.num_layers=10; make it 10"),
        (["pipeline.layout='E,B|B|Y|B,H'"], "column 7: 'Y' is not"),
        (
            ["pipeline.layout=auto", "pipeline.layers=[1,4,4,1]"],
            r"pipeline.layers=\[1, 4, 4, 1\] and pipeline.layout=auto",
        ),
    ],
)
def test_a_config_refuses_what_does_not_fit(tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, *overrides)


def shape(vocab_size, num_layers=32):
    sizes = {"hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "ffn_size": 14336}
    return ModelShape(num_layers=num_layers, vocab_size=vocab_size, gated=True, **sizes)


def test_auto_takes_blocks_from_the_stage_with_the_head():
    """At 128256 tokens of vocabulary the head is 2.1 blocks of 8B size at length 8192, and nothing at 64."""
    assert balanced_sizes(shape(128256), seq_len=8192, num_stages=8) == (4, 5, 4, 4, 4, 4, 4, 3)
    assert balanced_sizes(shape(128256, num_layers=30), seq_len=8192, num_stages=8) == (4, 4, 4, 4, 4, 4, 4, 2)
    assert balanced_sizes(shape(64), seq_len=8192, num_stages=8) == (4,) * 8
    assert balanced_sizes(shape(64, num_layers=3), seq_len=8192, num_stages=1) == (3,)


def test_a_config_balances_by_its_own_sizes(tmp_path):
    config = load(tmp_path, "pipeline.layout=auto", "model.vocab_size=20000")
    assert [end - start for start, end in config.stage_layers] == [3, 4, 3, 0]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(64, 500000))
def test_no_single_move_makes_the_busiest_stage_less_busy(num_layers, num_stages, vocab_size):
    made = shape(vocab_size, num_layers)
    sizes = balanced_sizes(made, seq_len=4096, num_stages=num_stages)
    head = flops_per_token(shape(vocab_size, 0), 4096)
    block = flops_per_token(shape(vocab_size, 1), 4096) - head
    work = [size * block + (head if stage == num_stages - 1 else 0) for stage, size in enumerate(sizes)]
    assert sum(sizes) == num_layers
    busiest = max(work)
    movable = [stage for stage in range(num_stages) if work[stage] == busiest and sizes[stage]]
    assert not movable or min(work) + block >= busiest


def test_equal_stages_give_the_rest_to_the_inner_ones():
    assert [equal_sizes(10, n) for n in (1, 2, 3, 4)] == [(10,), (5, 5), (3, 4, 3), (2, 3, 3, 2)]
    assert equal_sizes(9, 2) == (5, 4)
