"""The flat layout of a unit: where each parameter lies in its buffer, and what each shard of the buffer holds.

Pure arithmetic. A unit's buffer is the concatenation of its parameters in order, each start aligned, padded so that
every rank of the shard group holds the same number of elements. Padding is zero in values and gradients, so sums may
run over it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from megalite.parallel.spec import ParamSpec, Part

ALIGN = 8
"""Elements: 16 bytes of bf16, so that vector loads never straddle a parameter's start."""


@dataclass(frozen=True)
class Slot:
    """One parameter's place in the buffer."""

    name: str
    spec: ParamSpec
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Elements of the local parameter."""
        return prod(self.shape)


@dataclass(frozen=True)
class Run:
    """Consecutive elements of one part inside one shard: [part_offset, +length) of the part at shard_offset."""

    slot: Slot
    part: Part
    part_offset: int
    shard_offset: int
    length: int


@dataclass(frozen=True)
class FlatLayout:
    """Slots of a unit and its division into `num_shards` equal shards."""

    slots: tuple[Slot, ...]
    numel: int
    num_shards: int

    @property
    def shard_numel(self) -> int:
        """Elements of one shard."""
        return self.numel // self.num_shards

    def runs(self, shard: int) -> tuple[Run, ...]:
        """What shard number `shard` holds, in order of its offsets; padding is not listed. Found once per shard."""
        if shard not in self._runs:
            self._runs[shard] = tuple(self._find_runs(shard))
        return self._runs[shard]

    @cached_property
    def _runs(self) -> dict[int, tuple[Run, ...]]:
        return {}

    def _find_runs(self, shard: int) -> Iterator[Run]:
        begin, end = shard * self.shard_numel, (shard + 1) * self.shard_numel
        for slot, part, start in self._parts():
            low, high = max(start, begin), min(start + prod(part.shape), end)
            if low < high:
                yield Run(slot, part, low - start, low - begin, high - low)

    def segments(self, shard: int, keep: Callable[[Run], bool]) -> list[tuple[int, int]]:
        """Slices [begin, end) of the shard that cover all runs with keep(run) and none without; padding may be
        inside."""
        merged: list[list[int]] = []
        last_kept = False
        for run in self.runs(shard):
            kept = keep(run)
            if kept and last_kept:
                merged[-1][1] = run.shard_offset + run.length
            elif kept:
                merged.append([run.shard_offset, run.shard_offset + run.length])
            last_kept = kept
        return [(begin, end) for begin, end in merged]

    def _parts(self) -> Iterator[tuple[Slot, Part, int]]:
        for slot in self.slots:
            offset = slot.offset
            for part in slot.spec.parts:
                yield slot, part, offset
                offset += prod(part.shape)


def flat_layout(params: list[tuple[str, ParamSpec, tuple[int, ...]]], num_shards: int) -> FlatLayout:
    """Lay parameters (name, spec, local shape) out one after the other."""
    slots, offset = [], 0
    for name, spec, shape in params:
        slots.append(Slot(name, spec, tuple(shape), offset))
        offset = _round_up(offset + prod(shape), ALIGN)
    return FlatLayout(tuple(slots), _round_up(offset, ALIGN * num_shards), num_shards)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
