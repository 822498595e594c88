"""One ZeRO unit: the parameters that are gathered and reduced together, as views of flat buffers.

[Note: storages and views] Parameters are views of `full`, for ever. At stage 3 a free unit has an empty storage
behind `full`; a gather resizes it back and refills it, so views that autograd saved in between see the same numbers
again. A refill is the same value as before, thus it must not bump version counters.

[Note: who owns which numbers] `shard` (compute dtype) is what is gathered, `main` (main dtype) what the optimizer
owns; they are one tensor when the dtypes agree. `grad` (main dtype) is this rank's shard of the gradient; `full_grad`
exists from the first backward that needs it until it is reduced, or for the whole run when gradients are reduced once
per step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from megalite.comm.collectives import DONE, all_gather
from megalite.mesh import Group
from megalite.parallel.spec import ParamSpec
from megalite.parallel.zero.layout import FlatLayout

InitFn = Callable[[ParamSpec, tuple[int, ...]], Tensor]
"""(spec, local shape) -> the initial local parameter in the main dtype."""


class State(Enum):
    """Whether the full parameters may be read."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


@dataclass(frozen=True)
class Place:
    """Where a parameter hangs: a module and the attribute's name. A shared parameter has several places."""

    module: nn.Module
    attribute: str


class Unit:
    """Flat buffers of one unit and the transitions sharded -> gathering -> gathered -> sharded."""

    def __init__(self, name: str, layout: FlatLayout, places: list[list[Place]], *, group: Group, reshard: bool):
        self.name = name
        self.layout = layout
        self.places = places
        self.group = group
        self.reshards = reshard and group.size > 1
        self.state = State.GATHERED
        self.full_grad: Tensor | None = None
        self.copied = False
        """The optimizer has written `shard` together with `main`; the next `updated` need not copy."""
        self._work = DONE

    def allocate(self, init: InitFn, *, compute: torch.dtype, main: torch.dtype, device: torch.device) -> None:
        """Make the buffers, fill them with initial values and hang the parameters into their modules.

        Memory: while it runs one full unit in the main dtype; afterwards a full unit (free at stage 3) and the shards.
        """
        values = torch.zeros(self.layout.numel, dtype=main, device=device)
        for slot in self.layout.slots:
            values[slot.offset : slot.offset + slot.numel] = init(slot.spec, slot.shape).reshape(-1)
        self.full = values if compute == main else values.to(compute)
        own = slice(self.group.rank * self.layout.shard_numel, (self.group.rank + 1) * self.layout.shard_numel)
        self.shard = self.full[own].clone() if self.reshards else self.full[own]
        self.main = self.shard if compute == main else values[own].clone()
        self.grad = torch.zeros(0, dtype=main, device=device)  # the manager decides what backs it
        self.params = [self._hang(index) for index in range(len(self.places))]
        if self.reshards:
            self.reshard()

    def _hang(self, index: int) -> nn.Parameter:
        slot = self.layout.slots[index]
        param = nn.Parameter(self.full[slot.offset : slot.offset + slot.numel].view(slot.shape))
        param.spec = slot.spec
        param.main_grad = None
        for place in self.places[index]:
            setattr(place.module, place.attribute, param)
        return param

    @property
    def full_bytes(self) -> int:
        """Size of the gathered unit in the compute dtype."""
        return self.layout.numel * self.full.element_size()

    def start_gather(self) -> None:
        """Begin to assemble the full parameters, unless that is done or under way."""
        if self.state is not State.SHARDED:
            return
        if self.reshards:
            self.full.untyped_storage().resize_(self.full_bytes)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(self.full):
            self._work = all_gather(self.full, self.shard, self.group, site="zero.gather", async_op=True)
        self.state = State.GATHERING

    def finish_gather(self) -> None:
        """Return when the full parameters may be read."""
        if self.state is State.SHARDED:
            self.start_gather()
        if self.state is State.GATHERING:
            self._work.wait()
            self.state = State.GATHERED

    def reshard(self) -> None:
        """Free the full parameters (stage 3)."""
        if not self.reshards or self.state is State.SHARDED:
            return
        self.finish_gather()
        self.full.untyped_storage().resize_(0)
        self.state = State.SHARDED

    def settle(self) -> None:
        """Wait for a gather under way; before `main` is written, which may be a part of what the gather writes."""
        if self.state is State.GATHERING:
            self.finish_gather()

    def updated(self) -> None:
        """Take the optimizer's new `main` into the compute copy; full parameters are stale until gathered again."""
        self.settle()
        if self.shard is not self.main and not self.copied:
            self.shard.copy_(self.main)
        self.copied = False
        if self.group.size > 1:
            self.reshard()
            self.state = State.SHARDED

    def set_full_grad(self, buffer: Tensor | None) -> None:
        """Point every parameter's `main_grad` into `buffer` (main dtype, layout.numel elements), or away."""
        self.full_grad = buffer
        for slot, param in zip(self.layout.slots, self.params, strict=True):
            own = slice(slot.offset, slot.offset + slot.numel)
            param.main_grad = None if buffer is None else buffer[own].view(slot.shape)

    def collect_plain_grads(self) -> None:
        """Move gradients that autograd left in `.grad` (ops that are not ours) into the main gradient."""
        for param in self.params:
            if param.grad is not None:
                param.main_grad.add_(param.grad)
                param.grad = None
