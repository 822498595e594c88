"""The ZeRO units and links of a rank, from a config alone: the layouts that a run would make, without values.

One embedding, one block and one head are built on the meta device; all blocks of a model are alike. Which unit a link
reads and which it reduces follows from the stages of the rank, as in train/build.py.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

import torch

from megalite.config.schema import Config, Kernels
from megalite.kernels.registry import select
from megalite.mesh import Group, Sizes
from megalite.model.context import DTYPES, ModelContext
from megalite.model.gpt import Block, EmbeddingLink, HeadLink, Link
from megalite.model.stage import Stage, stage_units
from megalite.parallel.pp.lower import Lowered, lower
from megalite.parallel.pp.schedules import build_schedule, forward_only
from megalite.parallel.tp.rows import TensorParallel
from megalite.parallel.zero.layout import FlatLayout, flat_layout
from megalite.parallel.zero.manager import LinkUnits


@dataclass(frozen=True)
class RankPlan:
    """What the plan knows of one rank of a config."""

    config: Config
    rank: int
    training: Lowered
    """What every pp rank does in a training step."""

    @cached_property
    def sizes(self) -> Sizes:
        """The mesh arithmetic."""
        config = self.config
        return Sizes(pp=config.mesh.pp, dp_replicate=config.dp_replicate, dp_shard=config.dp_shard, tp=config.mesh.tp)

    @cached_property
    def at(self) -> dict[str, int]:
        """Coordinates of the rank by axis."""
        return self.sizes.coordinates(self.rank)

    @property
    def num_shards(self) -> int:
        """Ranks that share a unit's buffers; stage 0 replicates."""
        return self.config.dp_shard if self.config.zero.stage > 0 else 1

    @property
    def compute(self) -> torch.dtype:
        """What parameters and activations are."""
        return DTYPES[self.config.precision.compute]

    @property
    def main(self) -> torch.dtype:
        """What main params and gradients are."""
        return torch.promote_types(self.compute, torch.float32)

    @property
    def rows(self) -> int:
        """Rows of a microbatch, over all ranks of tp."""
        return self.config.batch.micro_batch_size * self.config.batch.seq_len

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """The stages of this rank."""
        return self.training.schedule.stages_of(self.at["pp"])

    @cached_property
    def links(self) -> dict[int, list[LinkUnits]]:
        """Stage -> the units of its chain."""
        reads = {stage: self._reads(stage) for stage in self.stages}
        seen: set[str] = set()
        found = {}
        for stage in self.stages:
            found[stage] = []
            for names in reads[stage]:
                reduces = tuple(name for name in names if name not in seen)
                found[stage].append(LinkUnits(names, reduces, backward_reads=names != self._ends[0].unit_names))
                seen.update(names)
        return found

    def _reads(self, stage: int) -> list[tuple[str, ...]]:
        first, last = self.config.stage_layers[stage]
        ends = self._ends
        embedding = [ends[0].unit_names] if stage == 0 else []
        head = [ends[2].unit_names] if stage == self.config.num_stages - 1 else []
        return [*embedding, *((f"layers.{layer}",) for layer in range(first, last)), *head]

    @cached_property
    def _ends(self) -> tuple[Link, Link, Link]:
        """The embedding, a block and the head, on the meta device."""
        model, tp = self.config.model, self.sizes.tp
        context = ModelContext(
            model=model,
            tp=TensorParallel(Group("tp", ranks=tuple(range(tp)), rank=self.at["tp"]), self.config.sequence_parallel),
            dtype=self.compute,
            padded_vocab=self.config.padded_vocab,
            recompute="none",
            seed=0,
            kernels=select(Kernels(), torch.device("cpu"), self.compute),
        )
        return EmbeddingLink(context), Block(0, context, None), HeadLink(context)

    @cached_property
    def layouts(self) -> dict[str, FlatLayout]:
        """Every unit of this rank and its flat layout."""
        made = {}
        for name, places in stage_units([Stage(0, list(self._ends), num_stages=1)]).items():
            places = places[:1] if name == "tied" else places  # the head's copy is the same parameter, or elsewhere
            params = [(label, getattr(module, attribute)) for module, attribute, label in places]
            made[name] = flat_layout([(label, p.spec, tuple(p.shape)) for label, p in params], self.num_shards)
        names = [name for links in self.links.values() for link in links for name in link.reads]
        return {name: made["layers.0" if name.startswith("layers.") else name] for name in dict.fromkeys(names)}

    def full_bytes(self, unit: str) -> int:
        """Size of a gathered unit."""
        return self.layouts[unit].numel * self.compute.itemsize


def logical_names(config: Config) -> list[str]:
    """The names of all tensors that one device would hold, blocks first."""
    one_rank = {"mesh": config.mesh.model_copy(update={"pp": 1, "dp": 1, "tp": 1}), "pipeline": type(config.pipeline)()}
    plan = plan_rank(config.model_copy(update=one_rank))
    parts = {unit: [p.name for slot in layout.slots for p in slot.spec.parts] for unit, layout in plan.layouts.items()}
    blocks = range(config.model.num_layers)
    names = [name.replace("layers.0.", f"layers.{layer}.", 1) for layer in blocks for name in parts["layers.0"]]
    return names + [name for unit, found in parts.items() if not unit.startswith("layers.") for name in found]


def check_frozen(config: Config) -> None:
    """Refuse patterns of model.frozen that match no tensor.

    Raises:
        ValueError: the patterns, and names of this model.
    """
    if not config.model.frozen:
        return
    names = logical_names(config)
    lost = [p for p in config.model.frozen if not any(fnmatchcase(name, p) for name in names)]
    if lost:
        kinds = ", ".join(
            dict.fromkeys(name for name in names if not name.startswith("layers.") or name.startswith("layers.0."))
        )
        raise ValueError(f"model.frozen={', '.join(lost)} matches no tensor of this model; its names are {kinds}, ...")


def plan_rank(config: Config, *, rank: int = 0) -> RankPlan:
    """The plan of one rank."""
    return RankPlan(config, rank, lowered(config, train=True))


def lowered(config: Config, *, train: bool) -> Lowered:
    """The lowered schedule of a training step, or of an evaluation."""
    pipeline = config.pipeline
    schedule = (build_schedule if train else forward_only)(
        pipeline.schedule, pp=config.mesh.pp, virtual=pipeline.virtual, num_microbatches=config.batch.num_microbatches
    )
    zero = config.zero
    return lower(schedule, zero_stage=zero.stage, reshard_after=zero.reshard_after, reduce_each=zero.reduce_each)
