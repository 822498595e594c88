"""ZeRO for all units of one rank: gathers, frees and reduces them around the forward and backward of model links.

Invariant: whatever the stage, when a link runs its full parameters hold the values of the last update, and after
`finish_grads` every shard holds the gradient of the whole global batch. Nothing wraps the model: the runtime calls
`before_*` and `after_*` with the names of a link's units, and the lowered schedule says when stages are gathered,
freed and reduced.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Protocol

import torch
from torch import Tensor

from megalite.comm.collectives import all_reduce
from megalite.mesh import Group, Mesh
from megalite.parallel.spec import ParamSpec
from megalite.parallel.zero.layout import Run, flat_layout
from megalite.parallel.zero.reduce import GradSink, Reducer
from megalite.parallel.zero.unit import InitFn, Place, State, Unit

GradCheck = Callable[[str, str, Tensor], None]
"""(unit, logical name, this rank's part of the gradient as a flat view)."""


class UnitSink(GradSink, Protocol):
    """A sink of units' gradients."""

    def begin_step(self) -> None:
        """Gradients will be overwritten."""

    def take(self, unit: Unit, segments: list[tuple[int, int]]) -> None:
        """These slices of `unit.grad` are as the optimizer shall see them."""


@dataclass(frozen=True)
class ZeroPolicy:
    """The choices of the `zero` section in plain form."""

    stage: int
    reduce_each_microbatch: bool
    compute: torch.dtype
    main: torch.dtype
    reduce: torch.dtype
    max_live_bytes: int | None = None
    """Prefetches that would pass it are put off. plan/live.py refuses a bound that a layout can't keep."""
    frozen: tuple[str, ...] = ()
    """Patterns of logical names, see parallel.spec.Part.frozen."""


@dataclass(frozen=True)
class LinkUnits:
    """The units of one model link: which it reads, and which it is the last to touch in backward."""

    reads: tuple[str, ...]
    reduces: tuple[str, ...]
    backward_reads: bool = True
    """Whether the backward reads them too."""

    def needs(self, *, backward: bool) -> tuple[str, ...]:
        """The units whose full parameters a pass needs."""
        return self.reads if self.backward_reads or not backward else ()


class ZeroManager:
    """Owns the units of this rank.

    Args:
        unit_params: unit name -> [(parameter name, parameter on meta with `.spec`, its places)].
        policy:      stage and dtypes.
        mesh:        at stage 0 the whole dp axis replicates, otherwise dp_shard shards and dp_replicate replicates.
        init:        initial values, called once per parameter.
    """

    def __init__(self, unit_params: dict[str, list], policy: ZeroPolicy, mesh: Mesh, init: InitFn):
        shards = policy.stage > 0
        one = Group("dp_shard", ranks=(mesh.rank,), ledger=mesh.ledger)
        self.shard_group = mesh.dp_shard if shards else one
        self.replicate_group = mesh.dp_replicate if shards else mesh.dp
        self.policy = policy
        self.mesh = mesh
        self.units = {name: self._unit(name, params, init) for name, params in unit_params.items()}
        self.reducer = Reducer(
            list(self.units.values()),
            self.shard_group,
            self.replicate_group,
            policy.reduce_each_microbatch,
            policy.reduce,
        )
        self.held: dict[str, set[int]] = {name: set() for name in self.units}
        self.peak_live_bytes = 0
        self.largest_link_bytes = 0
        """The most that one link of this rank reads."""
        self.grad_check: GradCheck | None = None
        self.sink: UnitSink | None = None

    def _unit(self, name: str, params: list, init: InitFn) -> Unit:
        slots = [(n, freeze(p.spec, self.policy.frozen), tuple(p.shape)) for n, p, _ in params]
        layout = flat_layout(slots, self.shard_group.size)
        places: list[list[Place]] = [where for _, _, where in params]
        unit = Unit(name, layout, places, group=self.shard_group, reshard=self.policy.stage == 3)
        unit.allocate(init, compute=self.policy.compute, main=self.policy.main, device=self.mesh.device)
        return unit

    # Around links

    def knows_link(self, link: LinkUnits) -> None:
        """Take note of a link that will run on this rank."""
        num_bytes = sum(self.units[name].full_bytes for name in link.reads)
        self.largest_link_bytes = max(self.largest_link_bytes, num_bytes)

    @property
    def live_bytes(self) -> int:
        """Full parameters that exist now, gathered or being gathered."""
        return sum(u.full_bytes for u in self.units.values() if u.state is not State.SHARDED or not u.reshards)

    def is_live(self, names: Iterable[str]) -> bool:
        """Whether the units are gathered or on their way."""
        return all(self.units[name].state is not State.SHARDED for name in names)

    def hold(self, stage: int, names: Iterable[str]) -> None:
        """Keep the stage's units gathered until `release`, and begin to gather them, in this order.

        Asks for no room: a stage is held while a microbatch is between its forward and its backward, so all stages of
        the rank are held at some time, and a bound below that is refused at the start.
        """
        for name in names:
            self.held[name].add(stage)
            self._start([name])

    def prefetch(self, names: Iterable[str], *, reserve: int = 0) -> None:
        """Begin to gather units unless the bound has no room for them and for `reserve` bytes that other links need
        meanwhile; they are then gathered when their link runs."""
        absent = [name for name in names if self.units[name].state is State.SHARDED]
        if self.policy.max_live_bytes is not None:
            needed = self.live_bytes + sum(self.units[name].full_bytes for name in absent) + reserve
            if needed > self.policy.max_live_bytes:
                return
        self._start(absent)

    def _start(self, names: Iterable[str]) -> None:
        absent = [unit for unit in map(self.units.__getitem__, names) if unit.state is State.SHARDED]
        for unit in absent:
            unit.start_gather()
        if absent or not self.peak_live_bytes:  # what is never gathered is live from the start
            self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes)

    def release(self, stage: int, names: Iterable[str]) -> None:
        """Undo `hold` and free the units that no other stage holds."""
        for name in names:
            self.held[name].discard(stage)
            if not self.held[name]:
                self.units[name].reshard()

    def before(
        self, link: LinkUnits, following: LinkUnits | None, *, grads: bool = False, backward: bool = False
    ) -> None:
        """Have ready what the pass needs of the link's parameters (and its gradient buffers with `grads`); prefetch the
        next link's, before the wait for this one's, so that the one gather goes on where the other ends."""
        needed = link.needs(backward=backward)
        self._start(needed)
        if following:
            self.prefetch(following.needs(backward=backward))
        for name in needed:
            self.units[name].finish_gather()
        if grads:
            self.ready_grads(link)

    def after(self, link: LinkUnits, following: LinkUnits | None, *, backward: bool = False) -> None:
        """Free what no stage holds and the next link does not need."""
        kept = following.needs(backward=backward) if following else ()
        for name in link.reads:
            if not self.held[name] and name not in kept:
                self.units[name].reshard()

    def ready_grads(self, link: LinkUnits) -> None:
        """Have buffers that the link's gradients may be added to."""
        self.reducer.poll()
        for name in link.reads:
            self.reducer.ready(self.units[name])

    def collect(self, link: LinkUnits) -> None:
        """Take in gradients that autograd left behind."""
        for name in link.reads:
            self.units[name].collect_plain_grads()

    def reduce(self, link: LinkUnits, *, last: bool = False) -> None:
        """Begin to reduce the units whose gradient this link completes; after the `last` time nothing is added."""
        for name in link.reduces:
            self.reducer.start(self.units[name], last=last)

    # Around steps

    def begin_step(self) -> None:
        """Zero all gradients."""
        if self.sink is not None:
            self.sink.begin_step()
        self.reducer.begin_step()

    def finish_grads(self) -> None:
        """Complete the gradient of every shard: over dp, over tp for what each tp rank saw in part, over the tied
        copies. Then call `check_grads`'s function.

        Communication: dp reductions that are still on their way; one packed all-reduce over tp and one over the kv
        replicas (only parts with spec.tp_reduce); one over the two ends of the pipeline for a tied embedding.
        """
        self.reducer.finish()
        self._reduce_runs(self.mesh.tp, lambda run: _reduces(run, "tp"), site="zero.tp_partial")
        self._reduce_runs(self.mesh.kv, lambda run: _reduces(run, "kv"), site="zero.kv_partial")
        if "tied" in self.units:
            all_reduce(self.units["tied"].grad, self.tied_group, site="zero.tied")
        for unit in self.units.values():
            for begin, end in self.segments(unit, lambda run: run.part.frozen):
                unit.grad[begin:end].zero_()
        if self.grad_check is not None:
            self._check_grads(self.grad_check)
        if self.sink is not None:
            for unit in self.units.values():
                self.sink.take(unit, self._late_segments(unit))

    def send_grads(self, sink: UnitSink) -> None:
        """Have `sink` take each unit's gradient as soon as nothing changes it any more: most of it when it is reduced
        over dp, while the backward goes on, and what is summed over tp, over the kv replicas or over the tied copies,
        is frozen, or is shown to a check, at the end of `finish_grads`."""
        self.sink = self.reducer.sink = sink
        self.reducer.complete = lambda unit: sink.take(unit, _between(self._late_segments(unit), unit.grad.numel()))

    def _late_segments(self, unit: Unit) -> list[tuple[int, int]]:
        """Slices of the unit's shard that `finish_grads` still changes after the reduction over dp."""
        if self.grad_check is not None or (unit.name == "tied" and self.tied_group.size > 1):
            return [(0, unit.grad.numel())]
        axes = [axis for axis, group in (("tp", self.mesh.tp), ("kv", self.mesh.kv)) if group.size > 1]
        return self.segments(unit, lambda run: run.part.frozen or any(_reduces(run, axis) for axis in axes))

    def check_grads(self, callback: GradCheck | None) -> None:
        """Have `callback` called at the end of every `finish_grads`, once for each run of a logical tensor's gradient
        that this rank's shards hold: complete, before clipping, in the main dtype. None: no longer.

        The view is the gradient itself: what the callback writes is what the optimizer reads, and must then be the same
        on all replicas. Frozen tensors are left out.
        """
        self.grad_check = callback

    def _check_grads(self, callback: GradCheck) -> None:
        for unit in self.units.values():
            for run in self.runs(unit):
                if not run.part.frozen:
                    callback(unit.name, run.part.name, unit.grad[run.shard_offset : run.shard_offset + run.length])

    def updated(self) -> None:
        """After an update (or a load) of main params: refresh the compute copies and begin to gather stages 1 and 2."""
        for unit in self.units.values():
            unit.updated()
        if self.policy.stage in (1, 2):
            for unit in self.units.values():
                unit.start_gather()

    def finish_gathers(self) -> None:
        """Wait for gathers under way."""
        for unit in self.units.values():
            if not unit.reshards:
                unit.finish_gather()

    def runs(self, unit: Unit) -> tuple[Run, ...]:
        """What this rank's shard of a unit holds."""
        return unit.layout.runs(self.shard_group.rank)

    def segments(self, unit: Unit, keep) -> list[tuple[int, int]]:
        """Slices of this rank's shard with keep(run); see FlatLayout.segments."""
        return unit.layout.segments(self.shard_group.rank, keep)

    @property
    def tied_group(self) -> Group:
        """The ranks that hold a copy of the tied embedding; this one alone if both ends of the pipeline are here."""
        both = "tied" in self.units and len(self.units["tied"].places[0]) > 1
        return Group("tied", ranks=(self.mesh.rank,), ledger=self.mesh.ledger) if both else self.mesh.tied

    @property
    def owns_replica(self) -> bool:
        """True on the ranks whose shards count in norms and are saved: the first data parallel replica."""
        return self.replicate_group.rank == 0

    def _reduce_runs(self, group: Group, keep, *, site: str) -> None:
        if group.size == 1:
            return
        slices: list[Tensor] = [
            unit.grad[begin:end] for unit in self.units.values() for begin, end in self.segments(unit, keep)
        ]
        if not slices:
            return
        packed = torch.cat(slices)
        all_reduce(packed, group, site=site)
        for piece, target in zip(packed.split([s.numel() for s in slices]), slices, strict=True):
            target.copy_(piece)


def freeze(spec: ParamSpec, patterns: tuple[str, ...]) -> ParamSpec:
    """The spec with its parts marked whose logical names match a pattern (`layers.0.*`)."""
    frozen = [any(fnmatchcase(part.name, pattern) for pattern in patterns) for part in spec.parts]
    return replace(spec, parts=tuple(replace(p, frozen=f) for p, f in zip(spec.parts, frozen, strict=True)))


def _reduces(run: Run, over: str) -> bool:
    return run.slot.spec.tp_reduce == over and run.part.num_replicas > 1


def _between(segments: list[tuple[int, int]], numel: int) -> list[tuple[int, int]]:
    """What ascending segments leave of [0, numel)."""
    edges = [0, *(edge for segment in segments for edge in segment), numel]
    return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]
