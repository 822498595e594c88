"""Gradient reduction over dp: full gradients of a unit become this rank's shard of the sum.

Invariant: `unit.grad` holds, after `finish`, the sum over all dp ranks and microbatches, in the main dtype. Two ways
to get there: once per step (the full gradient lives through the step and the shard is its own slice) or each
microbatch (full gradients come from a small ring of buffers, and shards accumulate). Rajbhandari et al.,
arXiv:1910.02054, sections 5 and 7.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from megalite.comm.collectives import Work, all_reduce, reduce_scatter
from megalite.mesh import Group
from megalite.parallel.zero.unit import Unit

RING = 2
"""Full gradient buffers at reduce_each=microbatch: one is filled while the other is on the wire. More are made only
when units hold theirs for longer: a tied weight between its two backwards, or embedding and head until their W."""


class GradSink(Protocol):
    """Takes gradients elsewhere on a stream of its own, while the backward still makes others."""

    def side(self) -> AbstractContextManager[None]:
        """Run on the sink's stream, behind what the current one has been given so far."""

    def mark(self) -> object:
        """An event of what the sink's stream has been given so far."""

    def wait(self, event: object) -> None:
        """Have the current stream wait for it."""


@dataclass
class Pending:
    """A reduction on its way: its result is added to the unit's shard, or takes its place, when it is finished."""

    unit: Unit
    work: Work
    result: Tensor
    source: Tensor
    last: bool
    replaces: bool = False
    finished: object = None
    """The event of the sink's stream, when that has finished it."""

    def finish(self) -> None:
        """Wait, then bring the result into the shard."""
        self.work.wait()
        if self.result.data_ptr() != self.unit.grad.data_ptr():
            (self.unit.grad.copy_ if self.replaces else self.unit.grad.add_)(self.result)


@dataclass
class Reducer:
    """Hands out full gradient buffers and reduces them."""

    units: list[Unit]
    shard_group: Group
    replicate_group: Group
    each_microbatch: bool
    dtype: torch.dtype
    """What is sent; gradients themselves keep the main dtype."""
    pending: list[Pending] = field(default_factory=list)
    free: list[Tensor] = field(default_factory=list)
    num_buffers: int = 0
    replicating: list[Pending] = field(default_factory=list)
    """All-reduces over the replicas, after everything else of their units."""
    sink: GradSink | None = None
    complete: Callable[[Unit], None] | None = None
    """With a sink: called when a unit's shard holds the sum over dp, as far as the sink's stream is concerned."""

    def __post_init__(self) -> None:
        for unit in self.units:
            if self.each_microbatch:
                unit.grad = torch.zeros_like(unit.main)
                continue
            numel, rank = unit.layout.shard_numel, unit.group.rank
            unit.set_full_grad(torch.zeros(unit.layout.numel, dtype=unit.main.dtype, device=unit.main.device))
            unit.grad = unit.full_grad[rank * numel : (rank + 1) * numel]

    def begin_step(self) -> None:
        """Zero the gradients."""
        for unit in self.units:
            (unit.grad if self.each_microbatch else unit.full_grad).zero_()

    def ready(self, unit: Unit) -> None:
        """Make sure that the unit's backward has a buffer to accumulate into."""
        if unit.full_grad is None:
            unit.set_full_grad(self._buffer()[: unit.layout.numel].zero_())

    def _buffer(self) -> Tensor:
        if not self.free and self.pending and self.num_buffers >= RING:
            self._finish_oldest()
        if not self.free:
            self.num_buffers += 1
            self.free.append(self.units[0].grad.new_empty(max(unit.layout.numel for unit in self.units)))
        return self.free.pop()

    def start(self, unit: Unit, *, last: bool) -> None:
        """Begin to reduce the unit's full gradient; it must not be added to before the next `ready`.

        Nothing is left to do when all contributions went with an earlier microbatch's (W actions may lag behind).

        Args:
            last: nothing is added to it any more in this step.
        """
        if unit.full_grad is not None:
            self.pending.append(self._scatter(unit, last))
        elif last:
            self._mark_last(unit)
        if last and self.shard_group.size == 1 and self.replicate_group.size > 1:
            while self.pending:  # nothing of it is on a wire
                self._finish_oldest()
            self.replicating.append(self._replicate(unit))
        self.poll()

    def _scatter(self, unit: Unit, last: bool) -> Pending:
        plain = self.shard_group.size == 1 or self.dtype == unit.main.dtype
        source = unit.full_grad if plain else unit.full_grad.to(self.dtype)
        in_place = not self.each_microbatch and source is unit.full_grad
        result = unit.grad if in_place else source.new_empty(unit.layout.shard_numel)
        if not self.each_microbatch and not in_place:
            unit.grad.zero_()  # its own contribution is in `source`
        work = reduce_scatter(result, source, self.shard_group, site="zero.reduce", async_op=True)
        held = unit.full_grad
        if self.each_microbatch:
            unit.set_full_grad(None)
        return Pending(unit, work, result, held, last)

    def _mark_last(self, unit: Unit) -> None:
        """The last reduction of the unit has been started before, or is even over."""
        own = [pending for pending in self.pending if pending.unit is unit]
        if own and own[-1].finished is None:
            own[-1].last = True
        else:
            self._is_scattered(unit)

    def _replicate(self, unit: Unit) -> Pending:
        sent = unit.grad.to(self.dtype)  # the gradient itself where the dtype is its own
        work = all_reduce(sent, self.replicate_group, site="zero.replicate", async_op=True)
        return Pending(unit, work, sent, sent, last=True, replaces=True)

    def poll(self) -> None:
        """Have the sink's stream take what is there, in the order in which it was started; blocks nowhere."""
        if self.sink is None:
            return
        for pending in (*self.pending, *self.replicating):
            if pending.finished is None:
                if not pending.work.done:
                    return
                self._finish_aside(pending)

    def _finish_aside(self, pending: Pending) -> None:
        """Finish on the sink's stream; `_finish` then has the current one wait for that."""
        with self.sink.side():
            pending.finish()
            pending.finished = self.sink.mark()
        if pending.replaces:
            self.complete(pending.unit)
        elif pending.last:
            self._is_scattered(pending.unit)

    def _is_scattered(self, unit: Unit) -> None:
        if self.sink is not None and self.replicate_group.size == 1:
            self.complete(unit)

    def finish(self) -> None:
        """Return when every shard holds the sum over dp."""
        while self.pending:
            self._finish_oldest()
        if self.replicate_group.size > 1:
            begun = {id(pending.unit) for pending in self.replicating}
            self.replicating += [self._replicate(unit) for unit in self.units if id(unit) not in begun]
            while self.replicating:
                self._finish(self.replicating.pop(0))

    def _finish(self, pending: Pending) -> None:
        if self.sink is None:
            pending.finish()
            return
        if pending.finished is None:
            self._finish_aside(pending)
        self.sink.wait(pending.finished)

    def _finish_oldest(self) -> None:
        done = self.pending.pop(0)
        self._finish(done)
        if self.each_microbatch:
            self.free.append(self._whole(done.source))

    def _whole(self, used: Tensor) -> Tensor:
        """The ring's whole buffer that `used` is the head of."""
        return used.as_strided((used.untyped_storage().nbytes() // used.element_size(),), (1,))
