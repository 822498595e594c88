"""AdamW and SGD on the flat shards of main params; the state is flat as well, one tensor per unit and kind.

Decay is a property of the parameter's kind, so a shard is updated in slices of equal decay. Loshchilov and Hutter,
arXiv:1711.05101.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from megalite.config.schema import Optimizer as OptimizerConfig
from megalite.kernels.adamw import Hyper, Tensors, adamw_step
from megalite.kernels.adamw.select import choose
from megalite.kernels.registry import Choice
from megalite.optim.apex import choose_apex
from megalite.optim.offload import HostUnits, empty_on_host
from megalite.optim.rounding import moments_key, store_rounded
from megalite.parallel.spec import Piece
from megalite.parallel.zero.layout import Run
from megalite.parallel.zero.manager import ZeroManager
from megalite.parallel.zero.unit import Unit


@dataclass(frozen=True)
class Placement:
    """Where the state lives, and as what."""

    offload: bool = False
    """State and update on the CPU, see optim/offload.py."""
    offload_main: bool = False
    """Main params too."""
    moments: torch.dtype | None = None
    """bfloat16, see optim/rounding.py; None: as main params."""
    seed: int = 0
    """Of the rounding."""


ON_DEVICE = Placement()


@dataclass(frozen=True)
class Slice:
    """Elements [begin, end) of a unit's shard that are updated with the same decay."""

    unit: Unit
    begin: int
    end: int
    decay: float

    def of(self, flat: Tensor) -> Tensor:
        """The slice of one of the unit's flat tensors."""
        return flat[self.begin : self.end]


class ShardOptimizer:
    """Updates `unit.main` from `unit.grad`, for every unit of the rank.

    Memory: AdamW two, SGD with momentum one tensor of the shard's size in the moments' dtype; bf16 ones are widened
    and rounded again unit by unit.
    """

    def __init__(self, zero: ZeroManager, config: OptimizerConfig, *, placement: Placement = ON_DEVICE):
        self.zero = zero
        self.config = config
        self.placement = placement
        self.moments = placement.moments or zero.policy.main
        self.kernel, self.norm_kernel = _kernels(config, zero, placement)
        self.host = HostUnits(zero.units, zero.mesh.device, main=placement.offload_main) if placement.offload else None
        if self.host is not None:
            zero.send_grads(self.host)
        self.step_count = 0
        kinds = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum",) if config.momentum > 0 else ()}[config.name]
        self.state = {k: {name: self._zeros(unit) for name, unit in zero.units.items()} for k in kinds}
        self.slices = [s for unit in zero.units.values() for s in self._slices(unit)]

    def _zeros(self, unit: Unit) -> Tensor:
        if self.host is not None:
            return empty_on_host(unit.grad, dtype=self.moments).zero_()
        return torch.zeros_like(unit.main, dtype=self.moments)

    def _slices(self, unit: Unit) -> list[Slice]:
        found = []

        def key(run: Run) -> tuple[bool, bool]:
            return run.part.frozen, run.slot.spec.kind in self.config.decay

        for (frozen, decay), group in groupby(self.zero.runs(unit), key=key):
            if frozen:
                continue
            runs = list(group)
            end = runs[-1].shard_offset + runs[-1].length
            found.append(Slice(unit, runs[0].shard_offset, end, self.config.weight_decay if decay else 0.0))
        return found

    def update(self, lr: float, *, scale: Tensor | float = 1.0) -> None:
        """One update of all main params from grad * scale (the clip factor); gradients are left as they are.

        AdamW kernels write the compute copy as well, so that `updated` of a unit has nothing left to copy.

        Numerics: everything in the main dtype; bias correction from the number of updates, which skipped steps don't
        raise.
        """
        self.step_count += 1
        self._settle()
        with torch.no_grad():
            for ready in self._portions():
                for decay in sorted({s.decay for s in ready}):
                    slices = [s for s in ready if s.decay == decay]
                    (self._adamw if self.config.name == "adamw" else self._sgd)(slices, lr, decay, scale)

    def _portions(self) -> Iterator[list[Slice]]:
        """What is updated together: all at once, or a unit at a time as it arrives or to bound the wide moments."""
        if self.host is not None:
            for unit in self.host.arriving():
                yield [s for s in self.slices if s.unit is unit]
                unit.copied = True
        elif self.moments != self.zero.policy.main:
            for unit in self.zero.units.values():
                yield [s for s in self.slices if s.unit is unit]
        else:
            yield self.slices

    def _settle(self) -> None:
        """A gather of the former values that no forward waited for must not write them over the new ones."""
        for unit in self.zero.units.values():
            unit.settle()

    def _adamw(self, slices: list[Slice], lr: float, decay: float, scale: Tensor | float) -> None:
        beta1, beta2 = self.config.betas
        hyper = Hyper(lr, beta1, beta2, self.config.eps, decay, self.step_count)
        tensors = [self._tensors(s) for s in slices]
        adamw_step(tensors, hyper, scale=scale, impl=self.kernel.module)
        for s, one in zip(slices, tensors, strict=True):
            self._keep("exp_avg", s, one.exp_avg)
            self._keep("exp_avg_sq", s, one.exp_avg_sq)
            s.unit.copied = True

    def _tensors(self, s: Slice) -> Tensors:
        if self.host is None:
            main, grad, copy = s.unit.main, s.unit.grad, None if s.unit.shard is s.unit.main else s.unit.shard
        else:
            host = self.host.copies[s.unit.name]
            main, grad, copy = host.main, host.grad, None
        moments = (self._wide(kind, s) for kind in ("exp_avg", "exp_avg_sq"))
        return Tensors(s.of(main), s.of(grad), *moments, None if copy is None else s.of(copy))

    def _wide(self, kind: str, s: Slice) -> Tensor:
        """A slice of the state in the main dtype: itself, or a copy."""
        return s.of(self.state[kind][s.unit.name]).to(self.zero.policy.main)

    def _keep(self, kind: str, s: Slice, wide: Tensor) -> None:
        """Round what `_wide` gave and the update changed back into the state."""
        if self.moments == self.zero.policy.main:
            return
        flat = self.state[kind][s.unit.name]
        for run in self.zero.runs(s.unit):
            if s.begin <= run.shard_offset < s.end:
                own = slice(run.shard_offset, run.shard_offset + run.length)
                key = moments_key(self.placement.seed, kind, run.part.name, self.step_count)
                values = wide[run.shard_offset - s.begin :][: run.length]
                store_rounded(flat[own], values, run.part, run.part_offset, key=key)

    def _sgd(self, slices: list[Slice], lr: float, decay: float, scale: Tensor | float) -> None:
        """Decay is decoupled, as in AdamW: main *= 1 - lr * decay before the step."""
        momentum = self.config.momentum
        for s in slices:
            flats = s.unit if self.host is None else self.host.copies[s.unit.name]
            main, grad = s.of(flats.main), s.of(flats.grad) * scale
            main.mul_(1 - lr * decay)
            if momentum > 0:
                grad = self._wide("momentum", s).mul_(momentum).add_(grad)
                self._keep("momentum", s, grad)
            main.add_(grad, alpha=-lr)

    def pieces(self, keep=lambda run: True) -> dict[str, list[Piece]]:
        """The rank's state for checkpoints: kind -> runs of logical tensors, as views that a load may write."""
        self._settle()
        flats = {"main": {name: unit.main for name, unit in self.zero.units.items()}, **self.state}
        return {kind: self._cut(tensors, keep) for kind, tensors in flats.items()}

    def grad_pieces(self, keep=lambda run: True) -> list[Piece]:
        """Runs of the gradient shards, as `pieces`."""
        return self._cut({name: unit.grad for name, unit in self.zero.units.items()}, keep)

    def _cut(self, tensors: dict[str, Tensor], keep) -> list[Piece]:
        return [
            Piece(run.part, run.part_offset, tensors[name][run.shard_offset : run.shard_offset + run.length])
            for name, unit in self.zero.units.items()
            for run in self.zero.runs(unit)
            if keep(run)
        ]


def _kernels(config: OptimizerConfig, zero: ZeroManager, placement: Placement) -> tuple[Choice, Choice]:
    """The implementations of the update and of the gradient norm, which stays on the device; SGD has plain torch only.

    Raises:
        ValueError: optimizer.implementation can't be met.
    """
    main = zero.policy.main
    device = torch.device("cpu") if placement.offload else zero.mesh.device
    if config.name == "sgd":
        update = choose("adamw", "reference", device=device, dtype=main)
        if config.implementation == "apex":
            raise ValueError("optimizer.implementation=apex has AdamW only; use optimizer.name=adamw or another one")
    elif config.implementation == "apex":
        update = choose_apex(device, main)
    else:
        update = choose("adamw", config.implementation, device=device, dtype=main)
    of_norm = "auto" if config.implementation == "apex" or placement.offload else config.implementation
    return update, choose("grad_norm", of_norm, device=zero.mesh.device, dtype=main)
