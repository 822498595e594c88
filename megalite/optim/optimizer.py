"""AdamW and SGD on the flat shards of main params; the state is flat as well, one tensor per unit and kind.

Decay is a property of the parameter's kind, so a shard is updated in slices of equal decay. Loshchilov and Hutter,
arXiv:1711.05101.
"""

from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megalite.config.schema import Optimizer as OptimizerConfig
from megalite.parallel.spec import Piece
from megalite.parallel.zero.manager import ZeroManager
from megalite.parallel.zero.unit import Unit


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

    Memory: AdamW two, SGD with momentum one tensor of the shard's size in the main dtype.
    """

    def __init__(self, zero: ZeroManager, config: OptimizerConfig):
        self.zero = zero
        self.config = config
        self.step_count = 0
        kinds = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum",) if config.momentum > 0 else ()}[config.name]
        self.state = {k: {name: torch.zeros_like(u.main) for name, u in zero.units.items()} for k in kinds}
        self.slices = [s for unit in zero.units.values() for s in self._slices(unit)]

    def _slices(self, unit: Unit) -> list[Slice]:
        found = []
        for decay, group in groupby(self.zero.runs(unit), key=lambda run: run.slot.spec.kind in self.config.decay):
            runs = list(group)
            end = runs[-1].shard_offset + runs[-1].length
            found.append(Slice(unit, runs[0].shard_offset, end, self.config.weight_decay if decay else 0.0))
        return found

    def update(self, lr: float) -> None:
        """One update of all main params; gradients are left as they are.

        Numerics: everything in the main dtype; bias correction from the number of updates, which skipped steps don't
        raise.
        """
        self.step_count += 1
        with torch.no_grad():
            for decay in sorted({s.decay for s in self.slices}):
                slices = [s for s in self.slices if s.decay == decay]
                (self._adamw if self.config.name == "adamw" else self._sgd)(slices, lr, decay)

    def _adamw(self, slices: list[Slice], lr: float, decay: float) -> None:
        beta1, beta2 = self.config.betas
        device = self.zero.mesh.device
        adamw(
            [s.of(s.unit.main) for s in slices],
            [s.of(s.unit.grad) for s in slices],
            [s.of(self.state["exp_avg"][s.unit.name]) for s in slices],
            [s.of(self.state["exp_avg_sq"][s.unit.name]) for s in slices],
            [],
            # adamw counts this update itself
            [torch.tensor(float(self.step_count - 1), device=device) for _ in slices],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=decay,
            eps=self.config.eps,
            maximize=False,
        )

    def _sgd(self, slices: list[Slice], lr: float, decay: float) -> None:
        """Decay is decoupled, as in AdamW: main *= 1 - lr * decay before the step."""
        momentum = self.config.momentum
        for s in slices:
            main, grad = s.of(s.unit.main), s.of(s.unit.grad)
            main.mul_(1 - lr * decay)
            if momentum > 0:
                grad = s.of(self.state["momentum"][s.unit.name]).mul_(momentum).add_(grad)
            main.add_(grad, alpha=-lr)

    def pieces(self, keep=lambda run: True) -> dict[str, list[Piece]]:
        """The rank's state for checkpoints: kind -> runs of logical tensors, as views that a load may write."""
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
