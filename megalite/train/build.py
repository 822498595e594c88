"""Config -> mesh -> model -> ZeRO -> pipeline -> optimizer, in this order; the only file that sees everything."""

from dataclasses import dataclass

import torch

from megalite.batch import Microbatch
from megalite.config.schema import Config
from megalite.mesh import Mesh, Sizes
from megalite.model.context import DTYPES
from megalite.model.init import init_tensor
from megalite.model.stage import Stage, build_stages, stage_units
from megalite.optim.optimizer import Placement, ShardOptimizer
from megalite.parallel.pp.check import check
from megalite.parallel.pp.chunk import Chunk
from megalite.parallel.pp.lower import Lowered, lower
from megalite.parallel.pp.runtime import PipelineRuntime, Wire
from megalite.parallel.pp.schedules import Schedule, build_schedule, forward_only
from megalite.parallel.zero.hooks import StageHooks
from megalite.parallel.zero.manager import LinkUnits, ZeroManager, ZeroPolicy
from megalite.parallel.zero.unit import Place
from megalite.plan.live import check_live_bytes
from megalite.plan.units import check_frozen


@dataclass
class Trainer:
    """Everything of one rank's run. `step.py` and `evaluate.py` act on it."""

    config: Config
    mesh: Mesh
    stages: list[Stage]
    zero: ZeroManager
    optimizer: ShardOptimizer
    runtime: PipelineRuntime
    eval_runtime: PipelineRuntime

    def close_overlap(self) -> None:
        """End the overlap of tp layers, which all stages share, after the last step or evaluation.

        Raises:
            RuntimeError: a wait of the last step gave up; until now only its update was skipped.
        """
        shared = {id(link.context.overlap): link.context.overlap for stage in self.stages for link in stage.links}
        for choices in shared.values():
            choices.close()


def sizes_of(config: Config) -> Sizes:
    """The mesh arithmetic of a config."""
    return Sizes(pp=config.mesh.pp, dp_replicate=config.dp_replicate, dp_shard=config.dp_shard, tp=config.mesh.tp)


def check_plan(config: Config) -> Schedule:
    """The training schedule of a config that has passed every check for which no rank must exist.

    `build` begins with it; `launch` and every rank call it before they start anything.

    Raises:
        ValueError: zero.max_live_bytes, model.frozen, pipeline.schedule or what its file holds.
    """
    check_live_bytes(config)
    check_frozen(config)
    schedule = build_schedule(
        config.pipeline.schedule,
        pp=config.mesh.pp,
        virtual=config.pipeline.virtual,
        num_microbatches=config.batch.num_microbatches,
        costs=config.pipeline.costs,
    )
    _check_tied_ends(config, schedule)
    return schedule


def build(config: Config, mesh: Mesh) -> Trainer:
    """Build this rank's part of the run: its stages' layers only, initial values drawn as the whole model would.

    Communication: none but the refresh of stage 1 and 2 shards, which holds no new values.

    Raises:
        ValueError: a choice that can't be met here: kernels, zero.max_live_bytes, model.frozen; on every rank.
    """
    schedule = check_plan(config)
    stages = build_stages(config, mesh, list(schedule.stages_of(mesh.pp.rank)))
    zero = _build_zero(config, mesh, stages)
    optimizer = ShardOptimizer(zero, config.optimizer, placement=_placement(config))
    hooks = {stage.index: _stage_hooks(config, zero, stage, stages) for stage in stages}
    chunks = {s.index: Chunk(s.index, s.links, hooks[s.index]) for s in stages}
    wire = Wire(lambda batch: _wire_shape(config, batch), DTYPES[config.precision.compute])
    training, evaluation = (
        PipelineRuntime(_lowered(config, s), chunks, hooks, mesh=mesh, wire=wire)
        for s in (schedule, _eval_schedule(config))
    )
    return Trainer(config, mesh, stages, zero, optimizer, training, evaluation)


def _check_tied_ends(config: Config, schedule: Schedule) -> None:
    """A tied embedding is summed over the first and last pp rank: a schedule file may not put its ends elsewhere."""
    ends = {schedule.stage_rank[0], schedule.stage_rank[-1]}
    if config.model.tie_embeddings and len(ends) == 2 and ends != {0, config.mesh.pp - 1}:
        raise ValueError(
            f"model.tie_embeddings=true needs the first and the last stage on one rank or on ranks 0 and "
            f"{config.mesh.pp - 1}, but pipeline.schedule={config.pipeline.schedule} has them on ranks "
            f"{', '.join(map(str, sorted(ends)))}; change the file or set model.tie_embeddings=false"
        )


def _eval_schedule(config: Config) -> Schedule:
    return forward_only(
        config.pipeline.schedule,
        pp=config.mesh.pp,
        virtual=config.pipeline.virtual,
        num_microbatches=config.batch.num_microbatches,
    )


def _lowered(config: Config, schedule: Schedule) -> Lowered:
    lowered = lower(
        schedule,
        zero_stage=config.zero.stage,
        reshard_after=config.zero.reshard_after,
        reduce_each=config.zero.reduce_each,
    )
    check(lowered)
    return lowered


def _build_zero(config: Config, mesh: Mesh, stages: list[Stage]) -> ZeroManager:
    compute = DTYPES[config.precision.compute]
    main = torch.promote_types(compute, torch.float32)
    policy = ZeroPolicy(
        stage=config.zero.stage,
        reduce_each_microbatch=config.zero.reduce_each == "microbatch",
        compute=compute,
        main=main,
        reduce=main if config.precision.reduce == "fp32" else torch.bfloat16,
        max_live_bytes=config.zero.max_live_bytes,
        frozen=config.model.frozen,
    )

    def init(spec, shape):
        return init_tensor(spec, shape, dtype=main, device=mesh.device, seed=config.run.seed)

    return ZeroManager(_unit_params(stages), policy, mesh, init)


def _placement(config: Config) -> Placement:
    return Placement(
        offload=config.zero.offload_optimizer == "cpu",
        offload_main=config.zero.offload_main,
        moments=torch.bfloat16 if config.precision.moments == "bf16" else None,
        seed=config.run.seed,
    )


def _unit_params(stages: list[Stage]) -> dict[str, list]:
    """unit -> [(name, parameter, places)]; a parameter that hangs in several modules is one entry."""
    units = {}
    for unit, entries in stage_units(stages).items():
        merged: dict[int, tuple] = {}
        for module, attribute, name in entries:
            param = getattr(module, attribute)
            merged.setdefault(id(param), (name, param, []))[2].append(Place(module, attribute))
        units[unit] = list(merged.values())
    return units


def _stage_hooks(config: Config, zero: ZeroManager, stage: Stage, stages: list[Stage]) -> StageHooks:
    """A unit read by two links of this rank (the tied weight) is reduced by the one whose backward comes last."""
    first_reader: dict[str, object] = {}
    for s in sorted(stages, key=lambda s: s.index):
        for link in s.links:
            for name in link.unit_names:
                first_reader.setdefault(name, link)
    links = [
        LinkUnits(
            tuple(link.unit_names),
            tuple(n for n in link.unit_names if first_reader[n] is link),
            backward_reads=link.backward_reads,
        )
        for link in stage.links
    ]
    streams = config.zero.stage == 3 and config.zero.reshard_after == "forward"
    return StageHooks(zero, stage.index, links, streams)


def _wire_shape(config: Config, batch: Microbatch) -> tuple[int, int]:
    rows = batch.rows // config.mesh.tp if config.sequence_parallel else batch.rows
    return rows, config.model.hidden_size
