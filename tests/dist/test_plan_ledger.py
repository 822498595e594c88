"""The plan's traffic is what a rank really sends, call for call and byte for byte, and its live bytes what it holds.

The ledger counts where bytes are handed to the wire; the plan derives the same from the config alone.
"""

from typing import Any

import pytest

from megalite.config.load import check
from megalite.config.schema import Config
from megalite.plan.live import peak_live_bytes
from megalite.plan.traffic import traffic
from megalite.train.build import build, sizes_of
from megalite.train.step import train_step
from tests.dist.layouts import BASE, EIGHT, GPT, INTERLEAVED, RECOMPUTE_LIST, Masks, global_batch, with_overrides
from tests.dist.pool import mesh_for, run_ranks
from tests.dist.test_layouts import own_microbatches

FP32 = "precision.compute=fp32"
HSDP = "mesh.dp.replicate=2 mesh.dp.shard=2"
ZBV = "pipeline.schedule=zbv pipeline.virtual=2"
LAYOUTS = {
    "one rank": "",
    "tp2": f"mesh.tp=2 {FP32}",
    "tp4 kv2 no sp": "mesh.tp=4 mesh.sequence_parallel=false",
    "tp4 kv1 bf16 gpt full recompute": f"mesh.tp=4 {GPT} model.num_kv_heads=1 precision.compute=bf16 recompute=full",
    "tp2 selective": "mesh.tp=2 recompute=selective",
    "pp2 tp2 recompute list": f"mesh.pp=2 mesh.tp=2 {RECOMPUTE_LIST}",
    "tp4 chunked full recompute": "mesh.tp=4 overlap.backend=chunked overlap.chunks=3 recompute=full",
    "pp2 tp2 no sp chunked": "mesh.pp=2 mesh.tp=2 mesh.sequence_parallel=false overlap.backend=chunked",
    "tp2 parts recompute list": (
        f"mesh.tp=2 overlap.backend=chunked batch.micro_batch_size=4 overlap.batch_parts=2 {RECOMPUTE_LIST}"
    ),
    "pp2 tp2 no sp four parts": (
        "mesh.pp=2 mesh.tp=2 mesh.sequence_parallel=false overlap.backend=chunked overlap.batch_parts=4 "
        "batch.micro_batch_size=4"
    ),
    "dp2 zero0 bf16 reduce": "mesh.dp=2 zero.stage=0 precision.compute=bf16 precision.reduce=bf16",
    "dp2 zero1": f"mesh.dp=2 zero.stage=1 {FP32}",
    "dp2 zero2 bf16 tied": "mesh.dp=2 zero.stage=2 precision.compute=bf16 model.tie_embeddings=true",
    "dp2 zero3 forward full recompute": f"mesh.dp=2 zero.stage=3 zero.reshard_after=forward recompute=full {FP32}",
    "dp2 zero3 step": "mesh.dp=2 zero.stage=3 zero.reshard_after=step zero.reduce_each=step",
    "hsdp zero2 bf16 reduce": f"{HSDP} zero.stage=2 precision.compute=bf16 precision.reduce=bf16",
    "hsdp zero3 tied": f"{HSDP} zero.stage=3 model.tie_embeddings=true {GPT}",
    "hsdp of one shard": "mesh.dp.replicate=2 mesh.dp.shard=1 zero.stage=3",
    "pp2 interleaved tied": f"mesh.pp=2 {INTERLEAVED} model.tie_embeddings=true {GPT}",
    "pp4 gpipe": "mesh.pp=4 pipeline.schedule=gpipe batch.global_batch_size=3",
    "pp2 zb_h1 zero3": "mesh.pp=2 mesh.dp=2 pipeline.schedule=zb_h1 zero.stage=3",
    "pp2 zb_h2 zero3 forward": "mesh.pp=2 mesh.dp=2 pipeline.schedule=zb_h2 zero.stage=3 zero.reshard_after=forward",
    "pp2 zbv tied zero3": f"mesh.pp=2 mesh.dp=2 {ZBV} zero.stage=3 model.tie_embeddings=true",
    "pp2 empty stages zero3 forward": (
        f"mesh.pp=2 mesh.dp=2 {INTERLEAVED} pipeline.layers=[2,0,0,2] zero.stage=3 zero.reshard_after=forward"
    ),
    "pp2 tp2 zero3": f"mesh.pp=2 mesh.dp=2 mesh.tp=2 {EIGHT} {INTERLEAVED} zero.stage=3 {FP32}",
    "pp2 tp2 zero3 bound": (
        "mesh.pp=2 mesh.dp=2 mesh.tp=2 zero.stage=3 zero.reshard_after=forward zero.max_live_bytes=56000"
    ),
}


def measure(rank: int, world: int, settings: dict[str, Any]) -> list[dict]:
    """The ledger of two steps, and the peak of live bytes."""
    config = check(settings, {}, name="layout")
    mesh = mesh_for(sizes_of(config), kv_replicas=config.kv_replicas)
    trainer = build(config, mesh)
    masks: Masks = "full"
    found = []
    for step in range(2):
        batches = own_microbatches(config, mesh.dp.rank, global_batch(settings, masks, step), step)
        mesh.ledger.reset()
        assert not train_step(trainer, batches, lr=0.01).skipped
        found.append({entry: (calls, mesh.ledger.sent_bytes[entry]) for entry, calls in mesh.ledger.calls.items()})
    return [*found, trainer.zero.peak_live_bytes]


def config_of(overrides: str) -> tuple[Config, dict[str, Any]]:
    settings = with_overrides(BASE, overrides)
    return check(settings, {}, name="layout"), settings


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_plan_equals_the_ledger(name):
    config, settings = config_of(LAYOUTS[name])
    for rank, (first, second, peak) in enumerate(run_ranks(config.world_size, measure, settings)):
        planned = traffic(config, rank=rank)
        assert first == second, f"rank {rank}: steps differ"
        assert second == {entry: tuple(sent) for entry, sent in planned.items()}, f"rank {rank}"
        assert peak == peak_live_bytes(config, rank=rank), f"rank {rank}"


def test_the_layouts_send_on_every_axis_from_every_site():
    """What no layout sends would be compared with nothing."""
    seen = set()
    for overrides in LAYOUTS.values():
        config, _ = config_of(overrides)
        for rank in range(config.world_size):
            seen |= {f"{entry.axis} {entry.op} {entry.site}" for entry in traffic(config, rank=rank)}
    assert seen >= {
        "dp all_reduce step.tokens", "world all_reduce step.scalars", "pp send SEND_F", "pp send SEND_B",
        "tp all_gather attention.qkv.forward", "tp reduce_scatter attention.qkv.backward",
        "tp all_reduce attention.qkv.backward", "tp all_reduce attention.out.forward",
        "tp all_gather mlp.up.forward", "tp reduce_scatter mlp.gate_up.backward", "tp all_gather mlp.down.backward",
        "tp reduce_scatter embedding.forward", "tp all_gather embedding.backward", "tp all_reduce embedding.forward",
        "tp all_gather head.forward", "tp reduce_scatter head.backward", "tp all_reduce head.backward",
        "tp all_reduce loss.max", "tp all_reduce loss.sum", "tp all_reduce zero.tp_partial",
        "kv all_reduce zero.kv_partial", "tied all_reduce zero.tied", "dp_shard all_gather zero.gather",
        "dp_shard reduce_scatter zero.reduce", "dp_replicate all_reduce zero.replicate", "dp all_reduce zero.replicate",
    }  # fmt: skip
