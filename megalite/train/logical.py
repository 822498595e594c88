"""Logical tensors of a whole run, assembled on every rank: for tests, verification and small exports.

Memory: the whole model on each rank; a checkpoint is the way for large ones.
"""

from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.comm.collectives import all_reduce
from megalite.optim.norm import counted
from megalite.parallel.spec import Piece
from megalite.train.build import Trainer


def full_params(trainer: Trainer) -> dict[str, Tensor]:
    """Main params by logical name."""
    return gather_logical(trainer, trainer.optimizer.pieces(counted)["main"])


def full_grads(trainer: Trainer) -> dict[str, Tensor]:
    """Main grads by logical name, after train.step.compute_grads or train_step, before clipping."""
    return gather_logical(trainer, trainer.optimizer.grad_pieces(counted))


def gather_logical(trainer: Trainer, pieces: list[Piece]) -> dict[str, Tensor]:
    """Assemble the pieces of all ranks; each element comes from the one rank that counts it.

    Communication: one all-reduce of the whole model over all ranks.
    """
    world = trainer.mesh.world
    own = {p.part.name: p.part.global_shape for p in pieces}
    gathered = [own]
    if world.size > 1:
        gathered = [None] * world.size
        dist.all_gather_object(gathered, own, group=world.pg)
    shapes = dict(sorted((name, shape) for shapes in gathered for name, shape in shapes.items()))
    main = trainer.zero.policy.main
    packed = torch.zeros(sum(prod(shape) for shape in shapes.values()), dtype=main, device=trainer.mesh.device)
    flats = packed.split([prod(shape) for shape in shapes.values()])
    full = {name: flat.view(shape) for flat, (name, shape) in zip(flats, shapes.items(), strict=True)}
    for piece in pieces if trainer.zero.owns_replica else []:
        _place(full[piece.part.name], piece)
    all_reduce(packed, world, site="logical")
    return {name: tensor.clone() for name, tensor in full.items()}  # views would be pickled with the whole buffer


def _place(full: Tensor, piece: Piece) -> None:
    """Write a run of a box's elements into the logical tensor."""
    part = piece.part
    box = full[tuple(slice(start, start + size) for start, size in zip(part.start, part.shape, strict=True))]
    flat = box.reshape(-1)  # a copy where the box is not contiguous
    flat[piece.offset : piece.offset + piece.data.numel()] = piece.data
    box.copy_(flat.view(part.shape))
