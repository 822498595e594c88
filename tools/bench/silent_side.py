"""megalite as a contestant that computes alone: its groups' local channel (megalite.mesh.LocalChannel) sends nothing.

Shapes are right and numbers are finite, since this rank's own part stands in for everyone's; so a step does all of its
computation, on wrong values.
"""

from dataclasses import fields, replace

from torch import Tensor

from bench import megalite_side
from megalite.config.schema import Config
from megalite.mesh import Group, Mesh


class SilentChannel:
    """Takes every collective of its group."""

    def takes(self, *tensors: Tensor) -> bool:
        """Yes."""
        return True

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """The own part is all."""

    def all_gather(self, out: Tensor, shard: Tensor) -> None:
        """The own part everywhere."""
        for part in out.view(-1, *shard.shape):
            if part.data_ptr() != shard.data_ptr():
                part.copy_(shard)

    def reduce_scatter(self, out: Tensor, full: Tensor) -> None:
        """The first rows of one's own."""
        if out.data_ptr() != full.data_ptr():
            out.copy_(full[: len(out)])

    def begin_reduce_scatter(self, out: Tensor, full: Tensor) -> None:
        """All of it."""
        self.reduce_scatter(out, full)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """What it holds already."""

    def barrier(self) -> None:
        """Nobody else is waited for."""


def silenced(mesh: Mesh) -> Mesh:
    """The mesh with groups that send nothing."""
    groups = {field.name: getattr(mesh, field.name) for field in fields(mesh)}
    silent = {name: replace(g, local=SilentChannel()) for name, g in groups.items() if isinstance(g, Group)}
    return replace(mesh, **silent)


class Trainer(megalite_side.Trainer):
    """One rank."""

    def make_mesh(self, config: Config) -> Mesh:
        """This rank's groups, silent."""
        return silenced(super().make_mesh(config))
