"""Each rule that joins fields, with its whole message: the numbers and the ways out are what a user acts on."""

import pytest

from megalite.config.load import check
from megalite.config.rules import problems
from megalite.config.schema import Config

MODEL = {"num_layers": 8, "hidden_size": 128, "num_heads": 16, "ffn_size": 352, "vocab_size": 257, "max_seq_len": 128}
BATCH = {"global_batch_size": 16, "micro_batch_size": 2}


def config(**sections) -> Config:
    """A valid config with changes: `model` and `batch` are added to, the other sections are taken as they are."""
    model = MODEL | sections.pop("model", {})
    batch = BATCH | sections.pop("batch", {})
    return Config(model=model, batch=batch, **sections)


def test_the_base_is_valid():
    assert problems(config()) == []


CASES = {
    "heads": (
        {"mesh": {"tp": 3, "sequence_parallel": False}, "model": {"ffn_size": 351}},
        "mesh.tp=3 does not divide model.num_heads=16; use 1, 2, 4, 8 or 16",
    ),
    "kv heads": (
        {"model": {"num_heads": 12, "num_kv_heads": 3, "hidden_size": 120}, "mesh": {"tp": 2}},
        "mesh.tp=2 and model.num_kv_heads=3: one must divide the other, so that ranks hold whole kv heads or copies of "
        "one; use mesh.tp=1, 3, 6 or 12",
    ),
    "query heads per kv head": (
        {"model": {"num_kv_heads": 3}},
        "model.num_kv_heads=3 does not divide model.num_heads=16: each kv head serves equally many query heads; use 1, "
        "2, 4, 8 or 16",
    ),
    "ffn": (
        {"model": {"ffn_size": 350}, "mesh": {"tp": 4}},
        "mesh.tp=4 does not divide model.ffn_size=350; use a divisor of it, or model.ffn_size=348 or 352",
    ),
    "head dim": (
        {"model": {"hidden_size": 130}},
        "model.num_heads=16 does not divide model.hidden_size=130; use model.hidden_size=128 or 144, or give "
        "model.head_dim",
    ),
    "odd rope": (
        {"model": {"head_dim": 7}},
        "model.head_dim=7 must be even for model.position=rope, which turns pairs; use model.head_dim=6 or 8",
    ),
    "rope theta with learned positions": (
        {"model": {"position": "learned", "rope_theta": 5e5}},
        "model.rope_theta=500000.0 has no effect with model.position=learned; leave it out (default 10000.0)",
    ),
    "rope scaling with learned positions": (
        {"model": {"position": "learned", "rope_scaling": {"type": "linear"}}},
        "model.rope_scaling={type: linear, factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, "
        "original_max_seq_len: 8192} has no effect with model.position=learned; leave it out (default null)",
    ),
    "bands of linear scaling": (
        {"model": {"rope_scaling": {"type": "linear", "low_freq_factor": 2.0}}},
        "model.rope_scaling.low_freq_factor=2.0 has no effect with model.rope_scaling.type=linear; leave it out "
        "(default 1.0)",
    ),
    "bands upside down": (
        {"model": {"rope_scaling": {"low_freq_factor": 4.0}}},
        "model.rope_scaling.high_freq_factor=4.0 must be above model.rope_scaling.low_freq_factor=4.0; use e.g. 4.0 "
        "and 1.0",
    ),
    "rows": (
        {"mesh": {"tp": 4}, "batch": {"micro_batch_size": 1, "seq_len": 126}},
        "mesh.tp=4 does not divide batch.micro_batch_size=1 * batch.seq_len=126 = 126 rows, which "
        "mesh.sequence_parallel=true shards; use batch.seq_len=124 or 128 or mesh.sequence_parallel=false",
    ),
    "learned positions end": (
        {"model": {"family": "gpt"}, "batch": {"seq_len": 256}},
        "batch.seq_len=256 is above model.max_seq_len=128 (the end of the learned positions); use batch.seq_len=128 or "
        "less, or model.max_seq_len=256",
    ),
    "rope too long": (
        {"batch": {"seq_len": 129}},
        "batch.seq_len=129 is above model.max_seq_len=128 (the longest allowed); use batch.seq_len=128 or less, or "
        "model.max_seq_len=129",
    ),
    "batch contradiction": (
        {"batch": {"num_microbatches": 3}, "mesh": {"dp": 2}},
        "batch.global_batch_size=16 is not batch.micro_batch_size=2 * batch.num_microbatches=3 * mesh.dp=2 = 12; use "
        "batch.global_batch_size=12, or set one of the three to null and it follows from the others",
    ),
    "micro batch does not divide": (
        {"mesh": {"dp": {"replicate": 1, "shard": 2}}, "batch": {"micro_batch_size": 3}},
        "batch.global_batch_size=16 and batch.micro_batch_size=3 with mesh.dp=2: 16 is not a multiple of 3 * 2 = 6, so "
        "there is no whole batch.num_microbatches; use batch.global_batch_size=12 or 18 or batch.micro_batch_size=1, "
        "2, 4 or 8",
    ),
    "microbatches do not divide": (
        {"mesh": {"dp": 3}, "batch": {"micro_batch_size": None, "num_microbatches": 2}},
        "batch.global_batch_size=16 and batch.num_microbatches=2 with mesh.dp=3: 16 is not a multiple of 2 * 3 = 6, so "
        "there is no whole batch.micro_batch_size; use batch.global_batch_size=12 or 18",
    ),
    "one batch size": (
        {"batch": {"micro_batch_size": None}},
        "batch.global_batch_size=16 is not enough: batch.global_batch_size = batch.micro_batch_size * "
        "batch.num_microbatches * mesh.dp; give two of the three batch sizes",
    ),
    "no batch size": (
        {"batch": {"micro_batch_size": None, "global_batch_size": None}},
        "batch without sizes is not enough: batch.global_batch_size = batch.micro_batch_size * "
        "batch.num_microbatches * mesh.dp; give two of the three batch sizes",
    ),
    "schedule": (
        {"pipeline": {"schedule": "zb_h9"}},
        "pipeline.schedule=zb_h9 is unknown; use gpipe, 1f1b, interleaved, zb_h1, zb_h2, zbv, v_half, dualpipe_v, or "
        "the path of a .csv file",
    ),
    "virtual": (
        {"pipeline": {"virtual": 2}},
        "pipeline.schedule=1f1b takes one chunk per rank, not pipeline.virtual=2 at mesh.pp=1; use pipeline.virtual=1 "
        "or pipeline.schedule=interleaved",
    ),
    "interleaved microbatches": (
        {"mesh": {"pp": 4}, "pipeline": {"schedule": "interleaved", "virtual": 2}, "batch": {"global_batch_size": 18}},
        "batch.num_microbatches=9 is not a multiple of mesh.pp=4, which pipeline.schedule=interleaved needs; use 8 or "
        "12 (batch.global_batch_size=16 or 24), or pipeline.schedule=1f1b with pipeline.virtual=1",
    ),
    "interleaved with fewer microbatches than ranks": (
        {"mesh": {"pp": 4}, "pipeline": {"schedule": "interleaved", "virtual": 2}, "batch": {"global_batch_size": 4}},
        "batch.num_microbatches=2 is not a multiple of mesh.pp=4, which pipeline.schedule=interleaved needs; use 4 "
        "(batch.global_batch_size=8), or pipeline.schedule=1f1b with pipeline.virtual=1",
    ),
    "too few layers": (
        {"mesh": {"pp": 4}, "pipeline": {"schedule": "interleaved", "virtual": 4}},
        "model.num_layers=8 is less than mesh.pp=4 * pipeline.virtual=4 = 16 stages; use fewer stages, "
        "model.num_layers=16 or more, or pipeline.layers with zeros for empty stages",
    ),
    "layer count": (
        {"mesh": {"pp": 2}, "pipeline": {"layers": [4, 2, 2]}},
        "pipeline.layers=[4, 2, 2] has 3 numbers, but mesh.pp=2 * pipeline.virtual=1 = 2 stages; give 2 numbers or "
        "leave it out",
    ),
    "layer sum": (
        {"mesh": {"pp": 2}, "pipeline": {"layers": [4, 3]}},
        "pipeline.layers=[4, 3] sums to 7, not to model.num_layers=8; make it sum to 8 or leave it out",
    ),
    "reshard without stage 3": (
        {"zero": {"stage": 2, "reshard_after": "forward"}},
        "zero.reshard_after=forward has no effect with zero.stage=2: parameters stay whole; leave it out (default "
        "microbatch)",
    ),
    "reduce early without stage 2": (
        {"zero": {"stage": 1, "reduce_each": "microbatch"}},
        "zero.reduce_each=microbatch with zero.stage=1: whole gradients are kept until the step, so reducing them "
        "earlier only costs traffic; use zero.reduce_each=step or zero.stage=2 or 3",
    ),
    "split without sharding": (
        {"zero": {"stage": 0}, "mesh": {"dp": {"replicate": 2, "shard": 2}}},
        "mesh.dp.shard=2 with zero.stage=0, which shards nothing; use mesh.dp=4, or zero.stage=1, 2 or 3",
    ),
    "GPU transport of CPU ranks": (
        {"comm": {"cuda_backend": "symm"}, "run": {"device": "cpu"}},
        "comm.cuda_backend=symm has no effect with run.device=cpu; leave it out (default auto)",
    ),
    "momentum": (
        {"optimizer": {"momentum": 0.9}},
        "optimizer.momentum=0.9 has no effect with optimizer.name=adamw; leave it out (default 0.0)",
    ),
    "betas": (
        {"optimizer": {"name": "sgd", "betas": [0.9, 0.999]}},
        "optimizer.betas=[0.9, 0.999] has no effect with optimizer.name=sgd; leave it out (default [0.9, 0.95])",
    ),
    "cpu transport on gpus": (
        {"comm": {"cpu_backend": "shm"}, "run": {"device": "cuda"}},
        "comm.cpu_backend=shm has no effect with run.device=cuda; leave it out (default auto)",
    ),
    "min ratio of a constant rate": (
        {"lr": {"schedule": "constant", "min_ratio": 0.5}},
        "lr.min_ratio=0.5 has no effect with lr.schedule=constant; leave it out (default 0.1)",
    ),
    "decay of a constant rate": (
        {"lr": {"schedule": "constant", "decay_steps": 5}},
        "lr.decay_steps=5 has no effect with lr.schedule=constant; leave it out (default null)",
    ),
    "wsd": (
        {"lr": {"schedule": "wsd", "warmup_steps": 60, "decay_steps": 50}},
        "lr.warmup_steps=60 + lr.decay_steps=50 is above run.steps=100 for lr.schedule=wsd; use lr.decay_steps=40 or "
        "less, or a shorter warm-up",
    ),
    "decay ends in the warm-up": (
        {"lr": {"warmup_steps": 20, "decay_steps": 20}},
        "lr.decay_steps=20 must be above lr.warmup_steps=20 for lr.schedule=cosine, which reaches its end at "
        "decay_steps; use 21 or more",
    ),
    "no split": (
        {"data": {"split": [0, 0, 0]}},
        "data.split=[0.0, 0.0, 0.0] has no part above 0; use e.g. [969, 30, 1]",
    ),
    "no train split": (
        {"data": {"split": [0, 1, 0]}},
        "data.split=[0.0, 1.0, 0.0] leaves nothing to train on; make the first number above 0, e.g. [969, 30, 1]",
    ),
    "no valid split": (
        {"data": {"split": [1, 0, 0]}, "run": {"eval_every": 5}},
        "run.eval_every=5 needs a valid part, but data.split=[1.0, 0.0, 0.0] has none; use e.g. data.split=[969, 30, "
        "1] or run.eval_every=0",
    ),
    "eod outside": (
        {"data": {"eod_id": 257, "document_mask": True}},
        "data.eod_id=257 is not below model.vocab_size=257; use an id of the vocabulary, or leave it out to take what "
        "the corpus records",
    ),
    "eod unused": (
        {"data": {"eod_id": 256}},
        "data.eod_id=256 has no effect with data.document_mask=false and data.mask_eod_loss=false; set one of them to "
        "true, or leave data.eod_id out",
    ),
    "costs without zb_h2": (
        {"pipeline": {"costs": [1, 2, 1, 0]}},
        "pipeline.costs=[1.0, 2.0, 1.0, 0.0] has no effect with pipeline.schedule=1f1b; leave it out (default null)",
    ),
    "fp64 reduced in bf16": (
        {"precision": {"compute": "fp64", "reduce": "bf16"}},
        "precision.reduce=bf16 would round the gradients of precision.compute=fp64; use precision.reduce=fp32 "
        "(gradients then stay fp64) or precision.compute=bf16",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rule(name):
    sections, message = CASES[name]
    assert problems(config(**sections)) == [message]


VALID = {
    "kv heads over ranks": {"model": {"num_kv_heads": 2}, "mesh": {"tp": 8}},
    "sgd": {"optimizer": {"name": "sgd", "momentum": 0.9}},
    "zb_h2 for costs": {"mesh": {"pp": 2}, "pipeline": {"schedule": "zb_h2", "costs": [1, 2, 1, 0.5]}},
    "interleaved on one rank": {
        "pipeline": {"schedule": "interleaved", "virtual": 4},
        "batch": {"global_batch_size": 6},
    },
    "odd microbatches without interleaving": {"mesh": {"pp": 4}, "batch": {"global_batch_size": 6}},
    "stage without blocks": {"mesh": {"pp": 2}, "pipeline": {"layers": [0, 8]}},
    "replicas only": {"mesh": {"dp": {"replicate": 4}}, "zero": {"stage": 0}},
    "rows need not divide without sequence parallel": {
        "mesh": {"tp": 4, "sequence_parallel": False},
        "batch": {"micro_batch_size": 1, "seq_len": 126},
    },
    "head dim of its own": {"model": {"hidden_size": 130, "head_dim": 8}},
    "vocabulary need not divide": {"mesh": {"tp": 16}, "model": {"vocab_size": 101}},
    "a check run without learning": {"lr": {"peak": 0}},
    "a run inside a longer schedule": {"lr": {"decay_steps": 1000}},
    "fp64": {"precision": {"compute": "fp64"}},
    "no learned position is odd": {"model": {"position": "learned", "head_dim": 7}},
}


@pytest.mark.parametrize("name", VALID)
def test_no_rule_against(name):
    assert problems(config(**VALID[name])) == []


def test_all_broken_rules_are_reported():
    broken = config(mesh={"tp": 3, "pp": 9}, optimizer={"momentum": 0.9}, batch={"global_batch_size": 17})
    starts = [text.split(" ")[0] for text in problems(broken)]
    assert starts == [
        "mesh.tp=3",
        "mesh.tp=3",
        "mesh.tp=3",
        "batch.global_batch_size=17",
        "model.num_layers=8",
        "optimizer.momentum=0.9",
    ]


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_the_ways_out_of_the_heads_message_work(tp):
    assert problems(config(mesh={"tp": tp})) == []


def test_check_gives_the_config_or_raises():
    values = {"model": MODEL, "batch": BATCH}
    assert check(values, {}, name="here") == config()
    with pytest.raises(ValueError, match=r"mesh\.tp=32 does not divide model.num_heads=16"):
        check(values | {"mesh": {"tp": 32}}, {}, name="here")
