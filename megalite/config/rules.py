"""Rules that join fields. Pure: `problems` looks at a `Config` and returns what is wrong with it, everything at once.

A message names every field it depends on with its value, says the rule, and ends with ways out that work. An option
that would have no effect is a problem too: nothing is silently ignored.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from megalite.config.overlap import overlap_problems
from megalite.config.pipeline import schedule_problems
from megalite.config.recompute import recompute_problems
from megalite.config.schema import Config, DpSplit, Kernels, Lr, Model, Optimizer, RopeScaling, Run

KERNELS = ("auto", "reference", "native", "triton", "cuda")


def problems(config: Config) -> list[str]:
    """Return one message for each broken rule; an empty list means that the config can be run."""
    found = [
        *_model(config.model),
        *_tensor_parallel(config),
        *_batch(config),
        *_pipeline(config),
        *_zero(config),
        *recompute_problems(config.recompute, config.model.num_layers),
        *_kernels(config.kernels, config.model),
        *_overlap(config),
        *_optimizer(config.optimizer),
        *_state(config),
        *_lr(config.lr, config.run.steps),
        *_data(config),
        *_trace(config.run),
        *_comm(config),
    ]
    if config.precision.compute == "fp64" and config.precision.reduce == "bf16":
        found.append(
            "precision.reduce=bf16 would round the gradients of precision.compute=fp64; use precision.reduce=fp32 "
            "(gradients then stay fp64) or precision.compute=bf16"
        )
    return found


def _trace(run: Run) -> Iterator[str]:
    if not run.trace:
        yield from _unused(run, "run", {"trace_steps": "with run.trace=false"})
    elif run.trace_steps is not None:
        first, last = run.trace_steps
        if not first <= last <= run.steps:
            yield (
                f"run.trace_steps={shown(run.trace_steps)} must be the first and the last step to trace, up to "
                f"run.steps={run.steps}; use e.g. [{min(first, run.steps)}, {min(max(first, last), run.steps)}]"
            )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, min(number, 4096) + 1) if number % d == 0]


def _choices(values: Iterable[Any]) -> str:
    """`1`, `1 or 2`, `1, 2 or 4`; of many values the first ones."""
    words = [str(v) for v in values]
    if len(words) > 12:
        words = [*words[:11], "..."]
        return ", ".join(words)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _near_multiples(value: int, of: int) -> str:
    """The multiples of `of` on both sides of `value`."""
    below = value // of * of
    return _choices([v for v in (below, below + of) if v > 0])


def _unused(section: Any, name: str, fields: dict[str, str]) -> Iterator[str]:
    """One message for each field that was changed although `fields` says why it has no effect."""
    for field, why in fields.items():
        default = type(section).model_fields[field].get_default(call_default_factory=True)
        value = getattr(section, field)
        if value != default:
            yield f"{name}.{field}={shown(value)} has no effect {why}; leave it out (default {shown(default)})"


def shown(value: Any) -> str:
    """The value as a config file would hold it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(shown(v) for v in value)}]"
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k}: {shown(v)}' for k, v in value.items())}}}"
    return str(value)


def _model(model: Model) -> Iterator[str]:
    heads, kv = model.num_heads, model.num_kv_heads
    if heads % kv:
        yield (
            f"model.num_kv_heads={kv} does not divide model.num_heads={heads}: each kv head serves equally many query "
            f"heads; use {_choices(_divisors(heads))}"
        )
    split_evenly = "head_dim" in model.model_fields_set or model.hidden_size % heads == 0
    if not split_evenly:
        yield (
            f"model.num_heads={heads} does not divide model.hidden_size={model.hidden_size}; use "
            f"model.hidden_size={_near_multiples(model.hidden_size, heads)}, or give model.head_dim"
        )
    if model.position == "rope" and split_evenly and model.head_dim % 2:
        yield (
            f"model.head_dim={model.head_dim} must be even for model.position=rope, which turns pairs; use "
            f"model.head_dim={_near_multiples(model.head_dim, 2)}"
        )
    if model.position == "learned":
        why = "with model.position=learned"
        yield from _unused(model, "model", {"rope_theta": why, "rope_scaling": why})
    if model.rope_scaling is not None:
        yield from _rope_scaling(model.rope_scaling)


def _rope_scaling(scaling: RopeScaling) -> Iterator[str]:
    if scaling.type == "linear":
        names = ("low_freq_factor", "high_freq_factor", "original_max_seq_len")
        yield from _unused(scaling, "model.rope_scaling", dict.fromkeys(names, "with model.rope_scaling.type=linear"))
    elif scaling.high_freq_factor <= scaling.low_freq_factor:
        yield (
            f"model.rope_scaling.high_freq_factor={scaling.high_freq_factor} must be above "
            f"model.rope_scaling.low_freq_factor={scaling.low_freq_factor}; use e.g. 4.0 and 1.0"
        )


def _tensor_parallel(config: Config) -> Iterator[str]:
    tp, model = config.mesh.tp, config.model
    heads, kv = model.num_heads, model.num_kv_heads
    if heads % tp:
        yield f"mesh.tp={tp} does not divide model.num_heads={heads}; use {_choices(_divisors(heads))}"
    elif kv % tp and tp % kv:
        fitting = [d for d in _divisors(heads) if kv % d == 0 or d % kv == 0]
        yield (
            f"mesh.tp={tp} and model.num_kv_heads={kv}: one must divide the other, so that ranks hold whole kv "
            f"heads or copies of one; use mesh.tp={_choices(fitting)}"
        )
    if model.ffn_size % tp:
        yield (
            f"mesh.tp={tp} does not divide model.ffn_size={model.ffn_size}; use a divisor of it, or "
            f"model.ffn_size={_near_multiples(model.ffn_size, tp)}"
        )
    batch = config.batch
    if config.sequence_parallel and batch.micro_batch_size and batch.micro_batch_size * batch.seq_len % tp:
        rows = batch.micro_batch_size * batch.seq_len
        yield (
            f"mesh.tp={tp} does not divide batch.micro_batch_size={batch.micro_batch_size} * batch.seq_len="
            f"{batch.seq_len} = {rows} rows, which mesh.sequence_parallel=true shards; use "
            f"batch.seq_len={_near_multiples(batch.seq_len, tp)} or mesh.sequence_parallel=false"
        )


def _batch(config: Config) -> Iterator[str]:
    batch, dp = config.batch, config.dp
    longest = config.model.max_seq_len
    if batch.seq_len > longest:
        reason = "the end of the learned positions" if config.model.position == "learned" else "the longest allowed"
        yield (
            f"batch.seq_len={batch.seq_len} is above model.max_seq_len={longest} ({reason}); use "
            f"batch.seq_len={longest} or less, or model.max_seq_len={batch.seq_len}"
        )
    given = {
        name: getattr(batch, name)
        for name in ("global_batch_size", "micro_batch_size", "num_microbatches")
        if getattr(batch, name) is not None
    }
    values = " and ".join(f"batch.{name}={value}" for name, value in given.items())
    rule = "batch.global_batch_size = batch.micro_batch_size * batch.num_microbatches * mesh.dp"
    if len(given) < 2:
        yield f"{values or 'batch without sizes'} is not enough: {rule}; give two of the three batch sizes"
    elif len(given) == 2:
        yield from _indivisible(given, values, dp)
    elif batch.global_batch_size != batch.micro_batch_size * batch.num_microbatches * dp:
        product = batch.micro_batch_size * batch.num_microbatches * dp
        yield (
            f"batch.global_batch_size={batch.global_batch_size} is not batch.micro_batch_size={batch.micro_batch_size} "
            f"* batch.num_microbatches={batch.num_microbatches} * mesh.dp={dp} = {product}; use "
            f"batch.global_batch_size={product}, or set one of the three to null and it follows from the others"
        )


def _indivisible(given: dict[str, int], values: str, dp: int) -> Iterator[str]:
    """The third of the batch sizes did not follow: global_batch_size is among `given` and is not divisible."""
    total = given["global_batch_size"]
    portion = next(value for name, value in given.items() if name != "global_batch_size")
    other = "num_microbatches" if "micro_batch_size" in given else "micro_batch_size"
    ways = [f"batch.global_batch_size={_near_multiples(total, portion * dp)}"]
    name = next(name for name in given if name != "global_batch_size")
    if total % dp == 0:
        ways.append(f"batch.{name}={_choices(_divisors(total // dp))}")
    yield (
        f"{values} with mesh.dp={dp}: {total} is not a multiple of {portion} * {dp} = {portion * dp}, so there is no "
        f"whole batch.{other}; use {' or '.join(ways)}"
    )


def _pipeline(config: Config) -> Iterator[str]:
    pipeline, pp, virtual = config.pipeline, config.mesh.pp, config.pipeline.virtual
    num_layers, stages = config.model.num_layers, config.num_stages
    sequences = config.batch.micro_batch_size * config.dp if config.batch.micro_batch_size else None
    yield from schedule_problems(
        pipeline.schedule,
        pp=pp,
        virtual=virtual,
        num_microbatches=config.batch.num_microbatches,
        sequences=sequences,
    )
    if pipeline.schedule != "zb_h2":
        yield from _unused(pipeline, "pipeline", {"costs": f"with pipeline.schedule={pipeline.schedule}"})
    if pipeline.layers is not None and pipeline.layout is not None:
        yield (
            f"pipeline.layers={shown(pipeline.layers)} and pipeline.layout={pipeline.layout} both say which blocks a "
            "stage has; leave one of them out"
        )
    elif pipeline.layers is not None:
        yield from _explicit_layers(pipeline.layers, num_layers, stages, f"mesh.pp={pp} * pipeline.virtual={virtual}")
    elif pipeline.layout is not None:
        yield from _layout(config)
    elif num_layers < stages:
        yield (
            f"model.num_layers={num_layers} is less than mesh.pp={pp} * pipeline.virtual={virtual} = {stages} stages; "
            f"use fewer stages, model.num_layers={stages} or more, or pipeline.layers with zeros for empty stages"
        )


def _layout(config: Config) -> Iterator[str]:
    try:
        _ = config.stage_layers
    except ValueError as error:
        yield str(error)


def _explicit_layers(layers: tuple[int, ...], num_layers: int, stages: int, product: str) -> Iterator[str]:
    if len(layers) != stages:
        yield (
            f"pipeline.layers={shown(layers)} has {len(layers)} numbers, but {product} = {stages} stages; give "
            f"{stages} numbers or leave it out"
        )
    if sum(layers) != num_layers:
        yield (
            f"pipeline.layers={shown(layers)} sums to {sum(layers)}, not to model.num_layers={num_layers}; "
            f"make it sum to {num_layers} or leave it out"
        )


def _zero(config: Config) -> Iterator[str]:
    zero, dp = config.zero, config.mesh.dp
    if zero.stage < 3:
        why = f"with zero.stage={zero.stage}: parameters stay whole"
        yield from _unused(zero, "zero", {"reshard_after": why, "max_live_bytes": why})
    elif config.dp_shard == 1:
        why = "with one shard (mesh.dp=1 or mesh.dp.shard=1): parameters stay whole"
        yield from _unused(zero, "zero", {"max_live_bytes": why})
    if zero.stage < 2 and zero.reduce_each == "microbatch":
        yield (
            f"zero.reduce_each=microbatch with zero.stage={zero.stage}: whole gradients are kept until the step, so "
            "reducing them earlier only costs traffic; use zero.reduce_each=step or zero.stage=2 or 3"
        )
    if zero.stage == 0 and isinstance(dp, DpSplit) and dp.shard > 1:
        yield (
            f"mesh.dp.shard={dp.shard} with zero.stage=0, which shards nothing; use mesh.dp={config.dp}, or "
            "zero.stage=1, 2 or 3"
        )


def _kernels(kernels: Kernels, model: Model) -> Iterator[str]:
    """Whether a choice can be met here is not known before the device is: see kernels/registry.py."""
    for op, choice in kernels:
        if choice not in KERNELS and not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", choice):
            yield f"kernels.{op}={choice} must be {_choices([*KERNELS, 'package.module:object'])}; use auto"
    why = {}
    if model.norm != "rmsnorm":
        why["rmsnorm"] = f"with model.norm={model.norm}"
    if model.norm != "layernorm":
        why["layernorm"] = f"with model.norm={model.norm}"
    if model.attention_dropout > 0.0:
        why["attention"] = "with model.attention_dropout above 0, for which weights are written out"
    if model.position != "rope":
        why["rope"] = f"with model.position={model.position}"
    if model.activation != "swiglu":
        why["swiglu"] = f"with model.activation={model.activation}"
    if model.activation != "gelu":
        why["gelu"] = f"with model.activation={model.activation}"
    if model.dropout == 0.0 and model.attention_dropout == 0.0:
        why["dropout"] = "with model.dropout=0 and model.attention_dropout=0"
    yield from _unused(kernels, "kernels", why)


def _overlap(config: Config) -> Iterator[str]:
    micro = config.batch.micro_batch_size
    if config.mesh.tp == 1:
        names = ["chunks", "batch_parts", "sites", *(["backend"] if config.overlap.backend != "none" else [])]
        yield from _unused(config.overlap, "overlap", dict.fromkeys(names, "with mesh.tp=1: nothing is sent"))
        return
    yield from overlap_problems(
        config.overlap,
        activation=config.model.activation,
        tp=config.mesh.tp,
        sequence_parallel=config.sequence_parallel,
        samples=micro,
        seq_len=config.batch.seq_len,
    )


def _optimizer(optimizer: Optimizer) -> Iterator[str]:
    why = f"with optimizer.name={optimizer.name}"
    names = ("momentum",) if optimizer.name == "adamw" else ("betas", "eps")
    yield from _unused(optimizer, "optimizer", dict.fromkeys(names, why))


def _state(config: Config) -> Iterator[str]:
    """Where the optimizer's state lives, and in which format."""
    zero, optimizer, moments = config.zero, config.optimizer, config.precision.moments
    stateless = optimizer.name == "sgd" and optimizer.momentum == 0.0
    why = "with optimizer.name=sgd and optimizer.momentum=0, which has no state"
    if stateless:
        yield from _unused(zero, "zero", {"offload_optimizer": why})
        yield from _unused(config.precision, "precision", {"moments": why})
    if zero.offload_optimizer == "none":
        yield from _unused(zero, "zero", {"offload_main": "with zero.offload_optimizer=none"})
    elif optimizer.implementation not in ("auto", "reference", "native"):
        yield (
            f"optimizer.implementation={optimizer.implementation} with zero.offload_optimizer=cpu: the update runs on "
            "the CPU; use optimizer.implementation=auto, reference or native"
        )
    if moments == "bf16" and config.precision.compute == "fp64":
        yield (
            "precision.moments=bf16 would round the moments of precision.compute=fp64; use precision.moments=fp32 "
            "(moments then stay fp64) or precision.compute=bf16"
        )
    if moments == "bf16" and optimizer.implementation == "apex":
        yield (
            "precision.moments=bf16 with optimizer.implementation=apex, which keeps fp32 moments; use "
            "precision.moments=fp32 or optimizer.implementation=auto"
        )


def _comm(config: Config) -> Iterator[str]:
    if config.run.device == "cuda":
        yield from _unused(config.comm, "comm", {"cpu_backend": "with run.device=cuda"})
    if config.run.device == "cpu":
        yield from _unused(config.comm, "comm", {"cuda_backend": "with run.device=cpu"})


def _lr(lr: Lr, steps: int) -> Iterator[str]:
    if lr.schedule == "constant":
        why = "with lr.schedule=constant"
        yield from _unused(lr, "lr", {"min_ratio": why, "decay_steps": why})
    elif lr.decay_steps is not None:
        yield from _decay(lr, steps)


def _decay(lr: Lr, steps: int) -> Iterator[str]:
    if lr.schedule == "wsd" and lr.warmup_steps + lr.decay_steps > steps:
        yield (
            f"lr.warmup_steps={lr.warmup_steps} + lr.decay_steps={lr.decay_steps} is above run.steps={steps} for "
            f"lr.schedule=wsd; use lr.decay_steps={max(1, steps - lr.warmup_steps)} or less, or a shorter warm-up"
        )
    if lr.schedule != "wsd" and lr.decay_steps <= lr.warmup_steps:
        yield (
            f"lr.decay_steps={lr.decay_steps} must be above lr.warmup_steps={lr.warmup_steps} for "
            f"lr.schedule={lr.schedule}, which reaches its end at decay_steps; use {lr.warmup_steps + 1} or more"
        )


def _data(config: Config) -> Iterator[str]:
    data, split = config.data, shown(config.data.split)
    if sum(data.split) == 0:
        yield f"data.split={split} has no part above 0; use e.g. [969, 30, 1]"
    elif data.split[0] == 0:
        yield f"data.split={split} leaves nothing to train on; make the first number above 0, e.g. [969, 30, 1]"
    elif config.run.eval_every and data.split[1] == 0:
        yield (
            f"run.eval_every={config.run.eval_every} needs a valid part, but data.split={split} has none; use e.g. "
            "data.split=[969, 30, 1] or run.eval_every=0"
        )
    if data.eod_id is not None and data.eod_id >= config.model.vocab_size:
        yield (
            f"data.eod_id={data.eod_id} is not below model.vocab_size={config.model.vocab_size}; use an id of the "
            "vocabulary, or leave it out to take what the corpus records"
        )
    if data.eod_id is not None and not (data.document_mask or data.mask_eod_loss):
        yield (
            f"data.eod_id={data.eod_id} has no effect with data.document_mask=false and data.mask_eod_loss=false; set "
            "one of them to true, or leave data.eod_id out"
        )
