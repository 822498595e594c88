"""Hashes of what must be equal across ranks: replicated parameters over tp, whole shards over data parallel replicas,
copies of a tied embedding over pp, gathered parameters over dp.

Invariant: all of these start equal and see equal updates, so they stay equal to the bit; a difference is a lost
message, a bad memory cell or a bug, and training on would only hide it. Every rank raises, with the same message.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.comm.collectives import all_gather, all_reduce
from megalite.mesh import Group
from megalite.parallel.zero.unit import Unit
from megalite.train.build import Trainer

CHUNK = 1 << 22
"""Elements hashed at once: bounds the int64 temporaries."""
MAX_SHOWN = 4
Named = list[tuple[str, Tensor]]


class ReplicaError(RuntimeError):
    """Copies that must be equal are not."""


def check_replicas(trainer: Trainer, step: int) -> None:
    """Compare all copies after `step`.

    Communication: 8 bytes per tensor and copy over tp, kv, tied and dp groups, and 8 bytes over all ranks.

    Raises:
        ReplicaError: on every rank, with the names and ranks that differ.
    """
    found = [text for group, named in copies(trainer) for text in _differences(group, named, trainer.mesh.device)]
    world = trainer.mesh.world
    num_found = torch.tensor(len(found), device=trainer.mesh.device)
    all_reduce(num_found, world, site="replicas.found")
    if int(num_found) == 0:
        return
    texts = [found]
    if world.size > 1:
        texts = [None] * world.size
        dist.all_gather_object(texts, found, group=world.pg)
    lines = list(dict.fromkeys(text for rank in texts for text in rank))
    more = f"\n  and {len(lines) - MAX_SHOWN} more" if len(lines) > MAX_SHOWN else ""
    shown = "".join(f"\n  {line}" for line in lines[:MAX_SHOWN])
    raise ReplicaError(
        f"after step {step} copies that must be equal differ:{shown}{more}\nResume from a checkpoint saved "
        "before; if it comes back on the same rank suspect its device, otherwise run `megalite verify` on the config"
    )


def copies(trainer: Trainer) -> Iterator[tuple[Group, Named]]:
    """Each group of ranks with the tensors that must be equal on it, in the same order on each of its ranks."""
    zero, mesh = trainer.zero, trainer.mesh
    yield mesh.tp, list(_replicated(trainer, lambda num: num == mesh.tp.size))
    yield mesh.kv, list(_replicated(trainer, lambda num: 1 < num < mesh.tp.size))
    units = list(zero.units.values())
    yield (
        zero.replicate_group,
        [(f"{kind} of unit {unit.name}", flat) for unit in units for kind, flat in _flats(trainer, unit)],
    )
    if "tied" in zero.units:
        tied = _flats(trainer, zero.units["tied"])
        yield zero.tied_group, [(f"{kind} of embedding.word.weight", flat) for kind, flat in tied]
    if zero.policy.stage in (1, 2):
        zero.finish_gathers()
        yield zero.shard_group, [(f"parameters of unit {unit.name}", unit.full) for unit in units]


def _flats(trainer: Trainer, unit: Unit) -> Iterator[tuple[str, Tensor]]:
    """The unit's shard of the main params and of the optimizer's state."""
    yield "main params", unit.main
    for kind, tensors in trainer.optimizer.state.items():
        yield kind, tensors[unit.name]


def _replicated(trainer: Trainer, wanted) -> Iterator[tuple[str, Tensor]]:
    """What this shard holds of the parts whose number of copies over tp is wanted."""
    for unit in trainer.zero.units.values():
        for run in trainer.zero.runs(unit):
            if run.part.num_replicas > 1 and wanted(run.part.num_replicas):
                for kind, flat in _flats(trainer, unit):
                    yield f"{kind} of {run.part.name}", flat[run.shard_offset : run.shard_offset + run.length]


def _differences(group: Group, named: Named, device: torch.device) -> list[str]:
    if group.size == 1 or not named:
        return []
    own = torch.stack([bits_hash(tensor).to(device) for _, tensor in named])  # an offloaded state is on the host
    every = own.new_empty(group.size * own.numel())
    all_gather(every, own, group, site="replicas.hashes")
    found = []
    for (name, _), column in zip(named, every.view(group.size, -1).T.tolist(), strict=True):
        if len(set(column)) > 1:
            found.append(f"{name}, over {group.axis}: {_parties(group, column)}")
    return found


def _parties(group: Group, hashes: list[int]) -> str:
    """The ranks, by what they hold."""
    parties: dict[int, list[int]] = {}
    for rank, value in zip(group.ranks, hashes, strict=True):
        parties.setdefault(value, []).append(rank)
    ordered = sorted(parties.items(), key=lambda item: -len(item[1]))
    return ", ".join(f"{_ranks(ranks)} {value & (2**64 - 1):016x}" for value, ranks in ordered)


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]} holds" if len(ranks) == 1 else f"ranks {' '.join(map(str, ranks))} hold"


def bits_hash(tensor: Tensor) -> Tensor:
    """An int64 scalar of the tensor's bits: the sum of each element's bits times an odd number of its position.

    Integer sums wrap, so the order of adding does not matter; one changed element always changes the hash.
    """
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.detach().contiguous().view(-1).view(words)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), CHUNK):
        piece = bits[start : start + CHUNK].long()
        position = torch.arange(start, start + piece.numel(), device=tensor.device)
        weight = position.mul_(-0x61C8864680B583EB).bitwise_xor_(position >> 29).bitwise_or_(1)
        total += (piece * weight).sum()
    return total
