"""The layouts that must train the same weights as one device: settings over one small model, and their batches.

A layout is a line of `key=value` overrides of BASE, and the masks of its batches. The table covers every axis, alone
and with each other; `test_layouts.py` says which combinations must be there. Everything is a pure function of names and
steps, so ranks and the oracle make the same batches without sending them.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import yaml

IGNORE = -100
SEQ_LEN = 16
NUM_STEPS = 3

BASE = {
    "model": {
        "family": "llama", "num_layers": 4, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 48,
        "vocab_size": 101, "max_seq_len": SEQ_LEN, "init_std": 0.1,
    },
    "batch": {"global_batch_size": 8, "micro_batch_size": 1, "seq_len": SEQ_LEN},
    "precision": {"compute": "fp64"},
    # eps far above roundings of gradients, else Adam blows those up; the clip acts in every step
    "optimizer": {"name": "adamw", "eps": 1e-6, "weight_decay": 0.1, "clip_norm": 0.5},
    "lr": {"peak": 1e-2, "schedule": "constant"},
    "run": {"seed": 7, "steps": NUM_STEPS, "device": "cpu"},
}  # fmt: skip

GPT = "model.family=gpt model.num_kv_heads=4"
SGD = "optimizer.name=sgd optimizer.eps=null optimizer.momentum=0.5 lr.peak=0.1"
INTERLEAVED = "pipeline.schedule=interleaved pipeline.virtual=2"
ZBV = "pipeline.schedule=zbv pipeline.virtual=2"
OWN = "pipeline.schedule=tests/dist/own_schedule.csv pipeline.virtual=2"
"""Stages 0 and 1 on rank 1, 2 and 3 on rank 0, 4 microbatches, backwards in another order than forwards: no named kind
is like it. Ranks run in the root of the project."""
EIGHT = "model.num_layers=8"
RECOMPUTE_LIST = (
    'recompute=[{"layers":[0,1],"ops":["attention","mlp"]},{"layers":[1,2],"ops":"full"},'
    '{"layers":[3,4],"ops":["activation"]}]'
)
SYMM = "overlap.backend=symm model.num_layers=2 batch.global_batch_size=2"
CHUNKED = "overlap.backend=chunked overlap.chunks=2"
PARTS = "overlap.backend=chunked batch.micro_batch_size=2"  # two parts
Masks = Literal["full", "uneven", "documents"]


@dataclass(frozen=True)
class Layout:
    """One row of the table."""

    overrides: str
    masks: Masks = "uneven"

    @property
    def settings(self) -> dict[str, Any]:
        """The whole configuration as nested dicts."""
        return with_overrides(BASE, self.overrides)

    @property
    def one_rank(self) -> dict[str, Any]:
        """The same model, batch and optimizer with no parallelism, no ZeRO and no recompute."""
        settings = self.settings
        for section in ("mesh", "pipeline", "zero", "recompute", "overlap", "comm"):
            settings.pop(section, None)
        return settings

    @property
    def dp(self) -> tuple[int, int]:
        """(replicate, shard)."""
        dp = self.settings.get("mesh", {}).get("dp", 1)
        return (dp["replicate"], dp["shard"]) if isinstance(dp, dict) else (1, dp)

    @property
    def world(self) -> int:
        """Number of ranks."""
        mesh = self.settings.get("mesh", {})
        return mesh.get("pp", 1) * mesh.get("tp", 1) * self.dp[0] * self.dp[1]

    @property
    def has_dropout(self) -> bool:
        """The oracle does not drop: compared with one rank of megalite instead."""
        model = self.settings["model"]
        return model.get("dropout", 0) > 0 or model.get("attention_dropout", 0) > 0


def with_overrides(settings: dict[str, Any], overrides: str) -> dict[str, Any]:
    """A copy of nested settings with dotted `key=value` words applied; values are YAML, null leaves the key out."""
    result = {key: dict(value) if isinstance(value, dict) else value for key, value in settings.items()}
    for word in overrides.split():
        key, value = word.split("=", 1)
        *sections, last = key.split(".")
        target = result
        for section in sections:
            target = target.setdefault(section, {})
        target[last] = yaml.safe_load(value)
        if target[last] is None:
            del target[last]
    return result


LAYOUTS = {
    "one-rank": Layout("", "full"),
    "one-rank-micro2": Layout("batch.micro_batch_size=2"),
    "one-rank-gpt-full-recompute": Layout(f"{GPT} recompute=full", "documents"),
    # tp
    "tp2": Layout("mesh.tp=2"),
    "tp2-no-sp": Layout("mesh.tp=2 mesh.sequence_parallel=false"),
    "tp2-tied": Layout("mesh.tp=2 model.tie_embeddings=true"),
    "tp2-gpt-sgd": Layout(f"mesh.tp=2 {GPT} {SGD}"),
    "tp2-gpt-no-sp-sgd": Layout(f"mesh.tp=2 mesh.sequence_parallel=false {GPT} {SGD}"),
    "tp4-kv2": Layout("mesh.tp=4 batch.micro_batch_size=2"),
    "tp4-kv2-no-sp-sgd": Layout(f"mesh.tp=4 mesh.sequence_parallel=false {SGD}"),
    "tp4-kv1-selective": Layout("mesh.tp=4 model.num_kv_heads=1 recompute=selective", "documents"),
    "tp4-gpt-full-recompute": Layout(f"mesh.tp=4 {GPT} recompute=full", "full"),
    # dp and ZeRO
    "dp2-zero0": Layout("mesh.dp=2 zero.stage=0"),
    "dp2-zero1-micro2": Layout("mesh.dp=2 zero.stage=1 batch.micro_batch_size=2"),
    "dp2-zero2": Layout("mesh.dp=2 zero.stage=2"),
    "dp2-zero2-reduce-step-sgd": Layout(f"mesh.dp=2 zero.stage=2 zero.reduce_each=step {SGD}"),
    "dp2-zero3-forward-gpt": Layout(f"mesh.dp=2 zero.stage=3 zero.reshard_after=forward {GPT}"),
    "dp2-zero3-step": Layout("mesh.dp=2 zero.stage=3 zero.reshard_after=step zero.reduce_each=step"),
    "dp4-zero2": Layout("mesh.dp=4 zero.stage=2"),
    "dp4-zero3-tied-sgd": Layout(f"mesh.dp=4 zero.stage=3 model.tie_embeddings=true {SGD}"),
    "dp4-zero3-full-recompute": Layout("mesh.dp=4 zero.stage=3 recompute=full", "documents"),
    "hsdp2x2-zero1": Layout("mesh.dp.replicate=2 mesh.dp.shard=2 zero.stage=1"),
    "hsdp2x2-zero2-gpt": Layout(f"mesh.dp.replicate=2 mesh.dp.shard=2 zero.stage=2 {GPT}"),
    "hsdp2x2-zero3-sgd": Layout(f"mesh.dp.replicate=2 mesh.dp.shard=2 zero.stage=3 {SGD}"),
    "hsdp4x1-zero3": Layout("mesh.dp.replicate=4 mesh.dp.shard=1 zero.stage=3"),
    # pp
    "pp2-gpipe": Layout("mesh.pp=2 pipeline.schedule=gpipe"),
    "pp2-1f1b-tied": Layout("mesh.pp=2 model.tie_embeddings=true"),
    "pp2-1f1b-gpt-sgd": Layout(f"mesh.pp=2 {GPT} {SGD}"),
    "pp2-uneven-stages": Layout("mesh.pp=2 pipeline.layers=[3,1] batch.micro_batch_size=2"),
    "pp2-interleaved": Layout(f"mesh.pp=2 {INTERLEAVED}"),
    "pp2-zb_h1": Layout("mesh.pp=2 pipeline.schedule=zb_h1"),
    "pp4-zb_h1-selective-tied-sgd": Layout(
        f"mesh.pp=4 pipeline.schedule=zb_h1 recompute=selective model.tie_embeddings=true {SGD}", "documents"
    ),
    "pp2-zb_h2-dp2-zero2-full-recompute": Layout(
        "mesh.pp=2 mesh.dp=2 pipeline.schedule=zb_h2 zero.stage=2 recompute=full"
    ),
    "pp2-zbv-gpt": Layout(f"mesh.pp=2 {ZBV} {GPT} model.bias=true"),
    "pp2-zbv-dp2-tp2-zero3-each-forward": Layout(
        f"mesh.pp=2 mesh.dp=2 mesh.tp=2 {ZBV} zero.stage=3 zero.reshard_after=forward zero.reduce_each=microbatch"
    ),
    "pp2-zbv-dp2-zero3-tied-each-step": Layout(
        f"mesh.pp=2 mesh.dp=2 {ZBV} zero.stage=3 zero.reduce_each=step model.tie_embeddings=true"
    ),
    "pp4-v_half-zero3-tied": Layout(
        f"mesh.pp=4 mesh.dp=2 {EIGHT} pipeline.schedule=v_half pipeline.virtual=2 zero.stage=3 "
        "model.tie_embeddings=true zero.reduce_each=microbatch"
    ),
    "pp2-dualpipe_v": Layout("mesh.pp=2 pipeline.schedule=dualpipe_v pipeline.virtual=2"),
    "pp2-v_half-layout-tied-sgd": Layout(
        f"mesh.pp=2 pipeline.schedule=v_half pipeline.virtual=2 pipeline.layout=E|3*B|B|H {SGD} "
        "model.tie_embeddings=true"
    ),
    "dp2-pp2-zero3-gpipe-full-recompute-offload": Layout(
        "mesh.dp=2 mesh.pp=2 pipeline.schedule=gpipe zero.stage=3 recompute=full zero.offload_optimizer=cpu"
    ),
    "dp2-pp2-tp2-zero3-zb_h1-selective-offload-main": Layout(
        "mesh.dp=2 mesh.pp=2 mesh.tp=2 pipeline.schedule=zb_h1 zero.stage=3 recompute=selective "
        "zero.offload_optimizer=cpu zero.offload_main=true"
    ),
    "dp2-pp2-zero3-step-each-zb_h2-costs-recompute-list-offload": Layout(
        "mesh.dp=2 mesh.pp=2 pipeline.schedule=zb_h2 zero.stage=3 zero.reshard_after=step zero.reduce_each=microbatch "
        f"zero.offload_optimizer=cpu pipeline.costs=[1,1.5,0.5,0.4] {RECOMPUTE_LIST}"
    ),
    "dp2-pp2-zero3-forward-step-v_half": Layout(
        "mesh.dp=2 mesh.pp=2 pipeline.schedule=v_half pipeline.virtual=2 zero.stage=3 zero.reshard_after=forward "
        "zero.reduce_each=step",
        "documents",
    ),
    "hsdp2x2-pp2-zero3-dualpipe_v-tied": Layout(
        "mesh.dp.replicate=2 mesh.dp.shard=2 mesh.pp=2 pipeline.schedule=dualpipe_v pipeline.virtual=2 zero.stage=3 "
        "batch.global_batch_size=16 model.tie_embeddings=true"
    ),
    "dp2-pp2-zero3-csv-tied-sgd": Layout(
        f"mesh.dp=2 mesh.pp=2 {OWN} zero.stage=3 model.tie_embeddings=true {SGD}"
    ),
    "dp2-pp2-zero3-interleaved-layout-auto": Layout(
        f"mesh.dp=2 mesh.pp=2 {INTERLEAVED} zero.stage=3 pipeline.layout=auto model.vocab_size=401"
    ),
    "pp2-interleaved-tied-sgd": Layout(f"mesh.pp=2 {INTERLEAVED} model.tie_embeddings=true {SGD}"),
    "pp2-virtual4-uneven": Layout(
        f"mesh.pp=2 {EIGHT} pipeline.schedule=interleaved pipeline.virtual=4 pipeline.layers=[0,2,1,1,1,1,2,0]"
    ),
    "pp4-1f1b-6-microbatches": Layout("mesh.pp=4 batch.global_batch_size=6"),
    "pp4-1f1b-2-microbatches": Layout("mesh.pp=4 batch.global_batch_size=2"),
    "pp4-gpipe-3-microbatches-tied": Layout(
        "mesh.pp=4 pipeline.schedule=gpipe batch.global_batch_size=3 model.tie_embeddings=true"
    ),
    "pp4-interleaved-full-recompute": Layout(f"mesh.pp=4 {EIGHT} {INTERLEAVED} recompute=full", "documents"),
    # together
    "pp2-tp2-tied-sgd": Layout(f"mesh.pp=2 mesh.tp=2 model.tie_embeddings=true {SGD}"),
    "pp2-tp2-gpt-selective": Layout(f"mesh.pp=2 mesh.tp=2 {GPT} recompute=selective", "documents"),
    "dp2-tp2-zero3": Layout("mesh.dp=2 mesh.tp=2 zero.stage=3", "documents"),
    "dp2-tp2-zero2-no-sp-sgd": Layout(f"mesh.dp=2 mesh.tp=2 mesh.sequence_parallel=false zero.stage=2 {SGD}"),
    "dp2-pp2-zero3-forward-interleaved": Layout(
        f"mesh.dp=2 mesh.pp=2 {INTERLEAVED} zero.stage=3 zero.reshard_after=forward"
    ),
    "dp2-pp2-zero1-gpipe-sgd": Layout(f"mesh.dp=2 mesh.pp=2 pipeline.schedule=gpipe zero.stage=1 {SGD}"),
    "dp2-pp2-tp2-zero3-interleaved": Layout(f"mesh.dp=2 mesh.pp=2 mesh.tp=2 {INTERLEAVED} zero.stage=3"),
    "dp2-pp2-tp2-zero3-step-tied-sgd": Layout(
        "mesh.dp=2 mesh.pp=2 mesh.tp=2 zero.stage=3 zero.reshard_after=step zero.reduce_each=step "
        f"model.tie_embeddings=true {SGD}"
    ),
    "dp2-pp2-tp2-zero2-gpt-full-recompute": Layout(f"mesh.dp=2 mesh.pp=2 mesh.tp=2 {GPT} zero.stage=2 recompute=full"),
    "hsdp2x2-tp2-zero3": Layout("mesh.dp.replicate=2 mesh.dp.shard=2 mesh.tp=2 zero.stage=3"),
    "hsdp2x2-pp2-zero2-interleaved-sgd": Layout(
        f"mesh.dp.replicate=2 mesh.dp.shard=2 mesh.pp=2 {INTERLEAVED} zero.stage=2 {SGD}"
    ),
    "pp2-tp4-kv2-tied": Layout("mesh.pp=2 mesh.tp=4 model.tie_embeddings=true"),
    "pp4-tp2-interleaved-tied-sgd": Layout(
        f"mesh.pp=4 mesh.tp=2 {EIGHT} {INTERLEAVED} model.tie_embeddings=true {SGD}"
    ),
    "dp2-tp4-kv2-zero3-sgd": Layout(f"mesh.dp=2 mesh.tp=4 zero.stage=3 {SGD}"),
    "dp2-tp2-zero3-recompute-list": Layout(f"mesh.dp=2 mesh.tp=2 zero.stage=3 {RECOMPUTE_LIST}", "documents"),
    # tp collectives in pieces under their GEMMs
    "tp2-chunked-gpt-bias": Layout(f"mesh.tp=2 {CHUNKED} {GPT} model.bias=true"),
    "tp2-no-sp-chunked-sgd": Layout(f"mesh.tp=2 mesh.sequence_parallel=false {CHUNKED} overlap.chunks=4 {SGD}"),
    "tp4-kv2-chunked": Layout(f"mesh.tp=4 {CHUNKED}"),
    "pp2-tp2-interleaved-chunked-sgd": Layout(f"mesh.pp=2 mesh.tp=2 {INTERLEAVED} {CHUNKED} {SGD}"),
    "pp2-tp2-zbv-chunked-selective": Layout(f"mesh.pp=2 mesh.tp=2 {ZBV} {CHUNKED} recompute=selective"),
    "dp2-pp2-tp2-zero3-forward-chunked": Layout(
        f"mesh.dp=2 mesh.pp=2 mesh.tp=2 zero.stage=3 zero.reshard_after=forward {CHUNKED}", "documents"
    ),
    "tp2-overlap-per-site": Layout(
        "mesh.tp=2 overlap.backend=none overlap.chunks=3 overlap.sites.attention.qkv.backward=chunked "
        "overlap.sites.mlp.down.forward=chunked overlap.sites.attention.out.backward=chunked "
        "overlap.sites.mlp.gate_up.forward=chunked batch.micro_batch_size=2"
    ),
    # parts of the microbatch take turns
    "tp2-parts": Layout(f"mesh.tp=2 {PARTS}", "documents"),
    "tp2-no-sp-parts-gpt-bias-tied-sgd": Layout(
        f"mesh.tp=2 mesh.sequence_parallel=false {PARTS} {GPT} model.bias=true model.tie_embeddings=true {SGD}"
    ),
    "tp4-kv2-four-parts-recompute-list": Layout(
        f"mesh.tp=4 overlap.backend=chunked batch.micro_batch_size=4 overlap.batch_parts=4 {RECOMPUTE_LIST}"
    ),
    "tp2-parts-full-recompute-gpt-bias": Layout(f"mesh.tp=2 {PARTS} {GPT} model.bias=true recompute=full"),
    "pp2-tp2-interleaved-parts-sgd": Layout(f"mesh.pp=2 mesh.tp=2 {INTERLEAVED} {PARTS} {SGD}"),
    "pp2-tp2-zbv-parts-selective": Layout(f"mesh.pp=2 mesh.tp=2 {ZBV} {PARTS} recompute=selective"),
    "dp2-pp2-tp2-zero3-forward-parts": Layout(
        f"mesh.dp=2 mesh.pp=2 mesh.tp=2 zero.stage=3 zero.reshard_after=forward {PARTS} comm.cpu_backend=gloo"
    ),
    # the same fused into one kernel, in Triton's interpreter
    "tp2-symm": Layout(f"mesh.tp=2 {SYMM} batch.micro_batch_size=2"),
    "tp2-no-sp-symm-gpt-bias-sgd": Layout(
        f"mesh.tp=2 mesh.sequence_parallel=false {SYMM} {GPT} model.bias=true batch.micro_batch_size=2 {SGD}"
    ),
    "dp2-pp2-tp2-zero3-symm": Layout(f"mesh.dp=2 mesh.pp=2 mesh.tp=2 zero.stage=3 {SYMM}"),
    # optimizer state on the host
    "dp2-zero1-offload": Layout("mesh.dp=2 zero.stage=1 zero.offload_optimizer=cpu"),
    "dp2-tp2-zero3-offload-main": Layout(
        "mesh.dp=2 mesh.tp=2 zero.stage=3 zero.offload_optimizer=cpu zero.offload_main=true"
    ),
    "hsdp2x2-zero2-offload-main-tied-sgd": Layout(
        "mesh.dp.replicate=2 mesh.dp.shard=2 zero.stage=2 zero.offload_optimizer=cpu zero.offload_main=true "
        f"model.tie_embeddings=true {SGD}"
    ),
    "dp2-zero0-offload-sgd": Layout(f"mesh.dp=2 zero.stage=0 zero.offload_optimizer=cpu {SGD}"),
    "tp2-offload": Layout("mesh.tp=2 zero.offload_optimizer=cpu", "documents"),
    "pp2-zbv-dp2-tp2-zero3-each-offload": Layout(
        f"mesh.pp=2 mesh.dp=2 mesh.tp=2 {ZBV} zero.stage=3 zero.reduce_each=microbatch zero.offload_optimizer=cpu"
    ),
    "pp2-tp4-kv2-tied-offload-main": Layout(
        "mesh.pp=2 mesh.tp=4 model.tie_embeddings=true zero.offload_optimizer=cpu zero.offload_main=true"
    ),
    "hsdp2x2-zero3-each-offload": Layout(
        "mesh.dp.replicate=2 mesh.dp.shard=2 zero.stage=3 zero.reduce_each=microbatch zero.offload_optimizer=cpu"
    ),
    # dropout: compared with one rank of megalite
    "dropout-dp2-micro2": Layout("mesh.dp=2 model.dropout=0.2 batch.micro_batch_size=2"),
    "dropout-tp2-attention": Layout(f"mesh.tp=2 {GPT} model.dropout=0.1 model.attention_dropout=0.1"),
    "dropout-dp2-pp2-tp2-zero3-full-recompute": Layout(
        "mesh.dp=2 mesh.pp=2 mesh.tp=2 zero.stage=3 recompute=full model.dropout=0.1 model.attention_dropout=0.1"
    ),
    "dropout-pp2-zb_h1-tp2-recompute-list": Layout(
        f"mesh.pp=2 mesh.tp=2 {RECOMPUTE_LIST} pipeline.schedule=zb_h1 model.dropout=0.1 model.attention_dropout=0.1"
    ),
    "dropout-tp2-chunked-full-recompute": Layout(
        f"mesh.tp=2 {CHUNKED} recompute=full model.dropout=0.1 model.attention_dropout=0.1"
    ),
    "dropout-tp2-parts-selective": Layout(
        f"mesh.tp=2 {PARTS} recompute=selective model.dropout=0.1 model.attention_dropout=0.1"
    ),
    # collectives through gloo, where all others share memory
    "gloo-tp2": Layout("mesh.tp=2 comm.cpu_backend=gloo"),
    "gloo-dp2-zero3": Layout("mesh.dp=2 zero.stage=3 comm.cpu_backend=gloo"),
    "gloo-dp2-pp2-tp2-zero3": Layout(f"mesh.dp=2 mesh.pp=2 mesh.tp=2 {INTERLEAVED} zero.stage=3 comm.cpu_backend=gloo"),
    # float32
    "fp32-tp2": Layout(f"mesh.tp=2 precision.compute=fp32 {SGD}"),
    "fp32-dp2-pp2-tp2-zero3": Layout(f"mesh.dp=2 mesh.pp=2 mesh.tp=2 zero.stage=3 precision.compute=fp32 {SGD}"),
}


def global_batch(settings: dict[str, Any], masks: Masks, step: int) -> dict[str, torch.Tensor]:
    """`tokens` and `labels` (B, S), and `documents` when they mask, of one step's whole global batch."""
    generator = torch.Generator().manual_seed(1000 + step)
    B, V = settings["batch"]["global_batch_size"], settings["model"]["vocab_size"]
    stream = torch.randint(V, (B, SEQ_LEN + 1), generator=generator)
    batch = {"tokens": stream[:, :-1].contiguous(), "labels": stream[:, 1:].clone()}
    if masks != "full":
        for sample in range(B):  # from every label trained to none at all, so that microbatches weigh differently
            batch["labels"][sample, SEQ_LEN - SEQ_LEN * sample // max(B - 1, 1) :] = IGNORE
    if masks == "documents":
        ends = torch.rand(B, SEQ_LEN, generator=generator) < 0.2
        batch["documents"] = ends.cumsum(1).to(torch.int32)
    return batch
