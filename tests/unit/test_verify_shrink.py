"""What a shrunk config keeps: every mechanism of the layout, on few ranks and small sizes."""

from typing import Any

import pytest

from megalite.config.load import load_config
from megalite.config.presets import preset_names
from megalite.config.schema import Config
from megalite.verify.shrink import CLIP_NORM, MAX_RANKS, one_device, shrink


def small(*overrides: str, preset: str = "llama3_70b", compute: str = "fp64") -> Config:
    return shrink(load_config(preset, list(overrides)), compute).layout


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize("compute", ["fp64", "fp32"])
def test_every_preset_shrinks(name, compute):
    config = load_config(name)
    shrunk = shrink(config, compute)
    layout, device = shrunk.layout, shrunk.device
    assert layout.world_size <= MAX_RANKS
    assert layout.model.hidden_size <= 64
    assert layout.precision.compute == device.precision.compute == compute
    for section in ("zero", "recompute"):
        assert getattr(layout, section) == getattr(config, section)
    assert layout.pipeline == config.pipeline
    assert layout.model.tie_embeddings == config.model.tie_embeddings
    assert layout.model.num_heads // layout.model.num_kv_heads == config.model.num_heads // config.model.num_kv_heads
    assert device.world_size == 1
    assert device.model == layout.model
    assert device.optimizer == layout.optimizer
    assert device.batch.global_batch_size == device.batch.micro_batch_size == layout.batch.global_batch_size


def test_the_largest_layout():
    layout = small()
    assert (layout.mesh.tp, layout.mesh.pp, layout.mesh.dp) == (2, 2, 2)
    assert layout.pipeline.virtual == 5
    assert layout.model.num_layers == 10
    assert layout.batch.num_microbatches == 4
    assert (layout.model.num_heads, layout.model.num_kv_heads) == (16, 2)


def test_what_only_gpus_have_is_left_out():
    assert small("comm.cuda_backend=symm").comm.cuda_backend == "auto"


def test_a_mesh_that_fits_is_kept():
    layout = small("mesh.tp=1", "mesh.dp=2", "mesh.pp=4")
    assert (layout.mesh.tp, layout.mesh.pp, layout.mesh.dp) == (1, 4, 2)


def test_data_parallel_replicas_of_shards_stay():
    layout = small("mesh.dp={replicate: 4, shard: 4}", "mesh.pp=1", "pipeline.schedule=1f1b", "pipeline.virtual=1")
    assert (layout.dp_replicate, layout.dp_shard, layout.mesh.tp) == (2, 2, 2)


@pytest.mark.parametrize(
    ("tp", "heads", "kv", "expected"),
    [
        (8, 64, 4, (2, 32, 2 // 2)),  # two ranks share a kv head
        (8, 64, 1, (2, 128 // 2, 1)),  # all ranks share the only one
        (8, 64, 8, (2, 16, 2)),  # one kv head a rank
        (8, 64, 32, (2, 8, 4)),  # several a rank
        (6, 12, 2, (3, 6, 1)),  # three ranks share one
    ],
)
def test_kv_heads_per_rank(tp, heads, kv, expected):
    layout = small(f"mesh.tp={tp}", f"model.num_heads={heads}", f"model.num_kv_heads={kv}", "model.ffn_size=28800",
                   "batch.seq_len=8160", "model.head_dim=128")  # fmt: skip
    ratio = heads // kv
    assert layout.mesh.tp == expected[0]
    assert layout.model.num_kv_heads == expected[2]
    assert layout.model.num_heads == expected[2] * ratio
    assert (layout.kv_replicas > 1) == (kv < tp)


@pytest.mark.parametrize(("vocab", "padded"), [(128256, False), (128257, True)])
def test_a_padded_vocabulary_stays_padded(vocab, padded):
    layout = small(f"model.vocab_size={vocab}")
    assert (layout.padded_vocab > layout.model.vocab_size) == padded


@pytest.mark.parametrize(
    ("pp", "dp", "layers", "expected"),
    [
        (4, 2, "[3,5,4,3]", (1, 2, 2, 1)),
        (4, 2, "[0,5,5,5]", (0, 1, 1, 1)),
        (4, 16, "[4,4,4,3]", (2, 1)),
        (4, 16, "[5,4,6,5]", (3, 2)),  # the two that stay are alike: made uneven
        (4, 16, "[5,5,5,5]", (1, 1)),
    ],
)
def test_listed_stages_stay_uneven(pp, dp, layers, expected):
    num_layers = sum(int(n) for n in layers.strip("[]").split(","))
    layout = small("mesh.tp=1", f"mesh.pp={pp}", f"mesh.dp={dp}", "pipeline.schedule=1f1b", "pipeline.virtual=1",
                   f"pipeline.layers={layers}", f"model.num_layers={num_layers}")  # fmt: skip
    assert layout.pipeline.layers == expected
    assert layout.model.num_layers == sum(expected)


@pytest.mark.parametrize(("num_layers", "uneven"), [(80, False), (81, True)])
def test_a_division_with_a_remainder_keeps_one(num_layers, uneven):
    layout = small(f"model.num_layers={num_layers}")
    assert (layout.model.num_layers % layout.num_stages > 0) == uneven


@pytest.mark.parametrize(
    ("schedule", "num", "expected"), [("1f1b", 64, 4), ("1f1b", 65, 5), ("1f1b", 2, 2), ("1f1b", 1, 1), ("gpipe", 3, 3)]
)
def test_microbatches(schedule, num, expected):
    layout = small(f"pipeline.schedule={schedule}", "pipeline.virtual=1", "batch.global_batch_size=null",
                   f"batch.num_microbatches={num}")  # fmt: skip
    assert layout.batch.num_microbatches == expected


def test_an_interleaved_schedule_gets_multiples_of_pp():
    for num, expected in ((4, 2), (8, 4), (64, 4)):
        layout = small("batch.global_batch_size=null", f"batch.num_microbatches={num}")
        assert layout.batch.num_microbatches == expected


def test_numbers_that_make_faults_visible():
    layout = small("optimizer.clip_norm=1.0")
    assert layout.optimizer.clip_norm == CLIP_NORM
    assert layout.model.init_std == 0.1
    assert small("optimizer.clip_norm=0").optimizer.clip_norm == 0
    assert small("model.dropout=0.2").model.dropout == 0.2


def test_reduction_in_bf16_is_run_in_fp32_only():
    layouts = {compute: small("precision.reduce=bf16", compute=compute) for compute in ("fp64", "fp32")}
    assert {compute: layout.precision.reduce for compute, layout in layouts.items()} == {"fp64": "fp32", "fp32": "bf16"}
    assert one_device(layouts["fp32"]).precision.reduce == "fp32"


def test_kernels_are_references():
    assert small("kernels.rmsnorm=triton").kernels.rmsnorm == "reference"
    assert small().kernels.rmsnorm == "auto"


def test_notes_say_what_was_shrunk():
    notes = shrink(load_config("llama3_70b"), "fp64").notes
    assert notes[0] == "mesh: pp 4 -> 2, dp 16 -> 2, tp 8 -> 2"
    assert any(note.startswith("precision: compute bf16 -> fp64") for note in notes)
    kept: dict[str, Any] = load_config("llama3_70b").model_dump()
    assert not any(f"rope_theta {kept['model']['rope_theta']}" in note for note in notes)


def test_overlap_stays_but_for_what_needs_a_gpu_or_more_rows():
    sites = "overlap.sites={attention.out.forward: symm, mlp.down.backward: none}"
    shrunk = shrink(load_config("llama3_70b", ["overlap.backend=chunked", "overlap.chunks=64", sites]), "fp64")
    assert shrunk.layout.overlap.backend == "chunked"
    assert shrunk.layout.overlap.chunks == shrunk.layout.batch.micro_batch_size * shrunk.layout.batch.seq_len // 2
    assert shrunk.layout.overlap.sites == {"attention.out.forward": "chunked", "mlp.down.backward": "none"}
    assert any(note.startswith("overlap: chunks 64 -> ") for note in shrunk.notes)
    assert shrunk.device.overlap.backend == "auto"


CHUNKED = "overlap.backend=chunked"
EIGHT = ["batch.micro_batch_size=8", "batch.global_batch_size=null", "batch.num_microbatches=8"]


@pytest.mark.parametrize(
    ("micro", "overrides", "before", "after"),
    [
        (8, [CHUNKED], 4, 2),
        (2, [CHUNKED], 2, 2),
        (8, [CHUNKED, "overlap.batch_parts=8"], 8, 2),
        (3, [CHUNKED, "overlap.batch_parts=3"], 3, 2),
        (8, [CHUNKED, "overlap.batch_parts=1"], 1, 1),
        (3, [CHUNKED], 1, 1),  # the small microbatch of two would get two by default
        (1, [CHUNKED], 1, 1),
        (8, [CHUNKED, "overlap.chunks=2"], 1, 1),
        (8, ["overlap.backend=symm"], 1, 1),  # becomes chunked, which would get parts by default
        (8, [CHUNKED, "mesh.sequence_parallel=false"], 4, 2),
        (8, [], 1, 1),
    ],
)
def test_parts_of_the_batch_stay_parts(micro, overrides, before, after):
    config = load_config("llama3_70b", [*overrides, *EIGHT, f"batch.micro_batch_size={micro}"])
    shrunk = shrink(config, "fp64")
    assert config.batch_parts == before
    assert shrunk.layout.batch_parts == after
    assert shrunk.device.batch_parts == 1


def test_the_number_of_parts_is_given_only_where_the_default_would_be_another():
    assert small(CHUNKED, *EIGHT).overlap.batch_parts is None
    assert small("overlap.backend=symm", *EIGHT).overlap.batch_parts == 1
    assert small("overlap.backend=none", *EIGHT).overlap.batch_parts is None
    shrunk = shrink(load_config("llama3_70b", [CHUNKED, "overlap.batch_parts=2", *EIGHT]), "fp64")
    assert shrunk.layout.overlap.batch_parts == 2
    assert not any(note.startswith("overlap") for note in shrunk.notes)


def test_each_part_has_rows_for_every_rank():
    layout = small(
        CHUNKED, "mesh.tp=8", "mesh.pp=1", "mesh.dp=1", "pipeline.schedule=1f1b", "pipeline.virtual=1", *EIGHT,
        "batch.seq_len=12",
    )  # fmt: skip
    assert layout.batch_parts == 2
    assert layout.batch.seq_len == 16  # of 12 rows a part could not give 8 ranks equal shares, two parts could
