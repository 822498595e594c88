"""Gradient reduction over dp: full gradients of a unit become this rank's shard of the sum.

Invariant: `unit.grad` holds, after `finish`, the sum over all dp ranks and microbatches, in the main dtype. Two ways
to get there: once per step (the full gradient lives through the step and the shard is its own slice) or each
microbatch (full gradients come from a small ring of buffers, and shards accumulate). Rajbhandari et al.,
arXiv:1910.02054, sections 5 and 7.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megalite.comm.collectives import Work, all_reduce, reduce_scatter
from megalite.mesh import Group
from megalite.parallel.zero.unit import Unit

RING = 2
"""Full gradient buffers at reduce_each=microbatch: one is filled while the other is on the wire. More are made only
when units hold theirs for longer: a tied weight between its two backwards, or embedding and head until their W."""


@dataclass
class Pending:
    """A reduction on its way: its result is added to the unit's shard when it is finished."""

    unit: Unit
    work: Work
    result: Tensor
    source: Tensor

    def finish(self) -> None:
        """Wait, then bring the result into the shard."""
        self.work.wait()
        if self.result.data_ptr() != self.unit.grad.data_ptr():
            self.unit.grad.add_(self.result)


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

    def start(self, unit: Unit) -> None:
        """Begin to reduce the unit's full gradient; it must not be added to before the next `ready`.

        Nothing is left to do when all contributions went with an earlier microbatch's (W actions may lag behind).
        """
        if unit.full_grad is None:
            return
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
        self.pending.append(Pending(unit, work, result, held))

    def finish(self) -> None:
        """Return when every shard holds the sum over dp."""
        while self.pending:
            self._finish_oldest()
        if self.replicate_group.size > 1:
            sent = [unit.grad.to(self.dtype) for unit in self.units]  # the gradient itself where the dtype is its own
            works = [all_reduce(t, self.replicate_group, site="zero.replicate", async_op=True) for t in sent]
            for unit, tensor, work in zip(self.units, sent, works, strict=True):
                work.wait()
                if tensor is not unit.grad:
                    unit.grad.copy_(tensor)

    def _finish_oldest(self) -> None:
        done = self.pending.pop(0)
        done.finish()
        if self.each_microbatch:
            self.free.append(self._whole(done.source))

    def _whole(self, used: Tensor) -> Tensor:
        """The ring's whole buffer that `used` is the head of."""
        return used.as_strided((used.untyped_storage().nbytes() // used.element_size(),), (1,))
