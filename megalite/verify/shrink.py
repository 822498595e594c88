"""A config's layout on a model that fits on a few CPU ranks: sizes shrink, mechanisms stay.

Kept: the schedule, chunks per rank, ZeRO and recompute options, tied embeddings, the ratio of query to kv heads, kv
heads that are replicated over tp, several heads per rank, a padded vocabulary, uneven stages, dropout, parts of the
batch. A mesh of more than MAX_RANKS ranks gets 2 per axis. Kernels are the references: they run on a CPU and in
float64. Pure: every change is a line of `Shrunk.notes`.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal

from megalite.config.load import check
from megalite.config.schema import Config, DpSplit

MAX_RANKS = 8
"""A mesh of at most this many ranks is kept as it is."""
SEQ_LEN = 16
VOCAB = 64
NUM_STEPS = 3
CLIP_NORM = 0.1
"""Far below the gradient norm of the small models, so that clipping acts in every step."""
INIT_STD = 0.1
"""At width 32 this lets attention depend on its scores; with 0.02 nearly all weights would be alike."""
ADAM_EPS = {True: 1e-3, False: 3e-2}
"""Near the size of a gradient's elements, clipped or not: Adam is then a smooth function of them, see bounds.py."""
LR = {"adamw": 1e-2, "sgd": 1e-1}
Compute = Literal["fp64", "fp32"]


@dataclass(frozen=True)
class Shrunk:
    """What is run: the layout, the same model on one device, and what became of the user's numbers."""

    layout: Config
    device: Config
    notes: tuple[str, ...]


def shrink(config: Config, compute: Compute) -> Shrunk:
    """The small twin of a config in the given precision, and its one-device reference."""
    before = config.model_dump(mode="json")
    values = config.model_dump(mode="json")
    values["mesh"] |= _mesh(config)
    values["model"] |= _model(config, values["mesh"]["tp"])
    values["pipeline"] |= {"layers": _layers(config, values["mesh"]["pp"]), "layout": None}
    values["model"]["num_layers"] = _num_layers(config, values)
    values["recompute"] = _recompute(config, values["model"]["num_layers"])
    values["batch"] = _batch(config, values)
    values["overlap"] |= _overlap(config, values)
    longer = config.model.max_seq_len > config.batch.seq_len
    values["model"]["max_seq_len"] = values["batch"]["seq_len"] + (4 if longer else 0)
    reduce = "fp32" if compute == "fp64" else config.precision.reduce  # fp32: gradients keep the main dtype
    # bf16 moments are rounded at random, by more than the bounds allow
    values["precision"] |= {"compute": compute, "reduce": reduce, "moments": "fp32"}
    values["optimizer"] |= _optimizer(config)
    values["kernels"] = {op: choice if choice == "auto" else "reference" for op, choice in values["kernels"].items()}
    values["lr"] = {"peak": LR[config.optimizer.name], "schedule": "constant"}
    values["data"] = {"document_mask": config.data.document_mask}
    values["comm"] |= {"cuda_backend": "auto"}  # the ranks of verify are on the CPU
    values["run"] = {"steps": NUM_STEPS, "seed": config.run.seed, "device": "cpu", "timeout_s": config.run.timeout_s}
    layout = check(values, {}, name="the shrunk config")
    return Shrunk(layout, one_device(layout), tuple(_notes(before, layout.model_dump(mode="json"))))


def one_device(layout: Config) -> Config:
    """The same model, global batch and optimizer on one rank, in one microbatch, with nothing sharded or recomputed."""
    values = layout.model_dump(mode="json")
    total = values["batch"]["global_batch_size"]
    values["batch"] |= {"micro_batch_size": total, "num_microbatches": 1}
    values |= {"mesh": {}, "pipeline": {}, "zero": {"stage": 0}, "recompute": "none", "overlap": {}}
    values["precision"]["reduce"] = "fp32"
    return check(values, {}, name="the one-device config")


def _mesh(config: Config) -> dict[str, Any]:
    mesh = config.mesh
    if config.world_size <= MAX_RANKS:
        return {}
    replicas = config.kv_replicas
    tp = min(mesh.tp, next(p for p in range(2, replicas + 1) if replicas % p == 0) if replicas > 1 else 2)
    dp: Any = min(config.dp, 2)
    if isinstance(mesh.dp, DpSplit):
        dp = {"replicate": min(mesh.dp.replicate, 2), "shard": min(mesh.dp.shard, 2)}
    return {"tp": tp, "pp": min(mesh.pp, 2), "dp": dp}


def _model(config: Config, tp: int) -> dict[str, Any]:
    """Width and vocabulary; tp divides what it must, and nothing more than before."""
    model, old_tp = config.model, config.mesh.tp
    if config.kv_replicas > 1:
        kv = tp // min(config.kv_replicas, tp)
    else:
        kv = tp * min(2, model.num_kv_heads // old_tp)
    heads = kv * (model.num_heads // model.num_kv_heads)
    head_dim = 8 if heads <= 8 else 4
    hidden = heads * head_dim
    split_evenly = model.hidden_size == model.num_heads * model.head_dim
    vocab = -(-VOCAB // tp) * tp + (1 if model.vocab_size % old_tp and tp > 1 else 0)
    return {
        "num_heads": heads,
        "num_kv_heads": kv,
        "head_dim": head_dim,
        "hidden_size": hidden if split_evenly else hidden + 8,
        "ffn_size": -(-3 * hidden // (2 * tp)) * tp,
        "vocab_size": vocab,
        "init_std": max(model.init_std, INIT_STD),
        "frozen": [re.sub(r"^layers\.\d+\.", "layers.0.", pattern) for pattern in model.frozen],
    }


def _layers(config: Config, pp: int) -> list[int] | None:
    """Blocks per stage where the config gives them: 0 stays 0, the smallest becomes 1, anything above it 2."""
    if config.pipeline.layers is None and config.pipeline.layout is None:
        return None
    listed = [end - begin for begin, end in config.stage_layers]
    old_pp, virtual = config.mesh.pp, config.pipeline.virtual
    ranks = range(pp) if pp == old_pp else [0, old_pp - 1][:pp]
    kept = [listed[chunk * old_pp + rank] for chunk in range(virtual) for rank in ranks]
    least = min(n for n in listed if n > 0)
    small = [0 if n == 0 else 1 if n == least else 2 for n in kept]
    if len(small) > 1 and len(set(small)) == 1 and len(set(listed)) > 1:
        small[0] += 1
    return small


def _num_layers(config: Config, values: dict[str, Any]) -> int:
    if values["pipeline"]["layers"] is not None:
        return sum(values["pipeline"]["layers"])
    stages, old = values["mesh"]["pp"] * config.pipeline.virtual, config.num_stages
    per_stage = 2 if config.model.num_layers >= 2 * old and stages <= 4 else 1
    uneven = 1 if config.model.num_layers % old and stages > 1 else 0
    return per_stage * stages + uneven


def _recompute(config: Config, num_layers: int) -> str | list[dict[str, Any]]:
    """Of a list each combination of ops that some block has, one block after the other, from the first on."""
    if isinstance(config.recompute, str):
        return config.recompute
    kinds = list(dict.fromkeys(config.recompute_ops(layer) for layer in range(config.model.num_layers)))
    wanted = [sorted(kinds[layer % len(kinds)]) for layer in range(num_layers)]
    return [{"layers": [layer, layer + 1], "ops": ops} for layer, ops in enumerate(wanted) if ops] or "none"


def _batch(config: Config, values: dict[str, Any]) -> dict[str, Any]:
    """Few microbatches of at most two sequences: fewer than pp, or not a multiple of it, where that was so."""
    batch, mesh = config.batch, values["mesh"]
    num, pp, old_pp = batch.num_microbatches, mesh["pp"], config.mesh.pp
    if config.pipeline.schedule == "interleaved" and pp > 1:
        num = pp * min(2, num // old_pp)
    else:
        wanted = 4 if pp == 1 else 2 * pp + (1 if num % old_pp else 0)
        num = min(num, wanted)
    dp = mesh["dp"]["replicate"] * mesh["dp"]["shard"] if isinstance(mesh["dp"], dict) else mesh["dp"]
    micro, tp = min(batch.micro_batch_size, 2), mesh["tp"]
    part_rows = micro // _num_parts(config) * batch.seq_len
    seq_len = batch.seq_len if batch.seq_len <= SEQ_LEN and part_rows % tp == 0 else -(-SEQ_LEN // tp) * tp
    return {
        "global_batch_size": micro * num * dp,
        "micro_batch_size": micro,
        "num_microbatches": num,
        "seq_len": seq_len,
    }


def _overlap(config: Config, values: dict[str, Any]) -> dict[str, Any]:
    """Not more pieces than rows; pieces in place of symm, whose kernels need a GPU; parts where there were some, and
    none where there were none: their number is given where the default would be another."""
    overlap, tp = config.overlap, values["mesh"]["tp"]
    samples, seq_len = values["batch"]["micro_batch_size"], values["batch"]["seq_len"]
    changed = {
        "backend": _on_cpu(overlap.backend),
        "chunks": None if overlap.chunks is None else min(overlap.chunks, samples * seq_len // tp),
        "sites": {site: _on_cpu(backend) for site, backend in overlap.sites.items()},
        "batch_parts": None,
    }
    default = overlap.model_copy(update=changed).num_batch_parts(
        samples=samples, seq_len=seq_len, split_rows=tp if values["mesh"]["sequence_parallel"] else 1
    )
    told = overlap.batch_parts is not None or default != _num_parts(config)
    return changed | {"batch_parts": _num_parts(config) if told else None}


def _num_parts(config: Config) -> int:
    """Of the small microbatch: two where there were some, which then has two sequences."""
    return min(config.batch_parts, 2)


def _on_cpu(backend: str) -> str:
    return "chunked" if backend == "symm" else backend


def _optimizer(config: Config) -> dict[str, Any]:
    optimizer = config.optimizer
    on_cpu = optimizer.implementation in ("auto", "reference", "native")
    changed = {
        "clip_norm": min(optimizer.clip_norm, CLIP_NORM),
        "implementation": optimizer.implementation if on_cpu else "reference",
    }
    if optimizer.name == "adamw":
        changed["eps"] = max(optimizer.eps, ADAM_EPS[optimizer.clip_norm > 0])
    return changed


SHOWN = ("mesh", "pipeline", "zero", "model", "batch", "precision", "kernels", "overlap", "optimizer", "lr")


def _notes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """One line per section: `mesh: tp 8 -> 2, pp 4 -> 2`."""
    lines = []
    for section in SHOWN:
        old, new = before[section], after[section]
        changed = [f"{key} {_text(old[key])} -> {_text(new[key])}" for key in old if old[key] != new[key]]
        if changed:
            lines.append(f"{section}: {', '.join(changed)}")
    return lines


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return " x ".join(str(v) for v in value.values())
    return "default" if value is None else str(value)
