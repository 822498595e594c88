"""Small agreements between ranks: every rank learns what every other has to say, or that one of them failed.

Invariant: all ranks of the group leave `exchange` with the same list, so they all go on or all raise. Values are JSON,
compressed; nothing is pickled.
"""

import json
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.comm.collectives import all_gather, all_reduce
from megalite.mesh import Group


def exchange(value: Any, group: Group) -> list[Any]:
    """Give every rank's JSON value to all ranks of the group, in rank order.

    Communication: an all-reduce of 8 bytes and an all-gather of the longest rank's compressed JSON.
    """
    if group.size == 1:
        return [value]
    device = _device(group)
    raw = zlib.compress(json.dumps(value).encode())
    longest = torch.tensor([len(raw)], dtype=torch.int64, device=device)
    all_reduce(longest, group, op="max", site="checkpoint")
    shard = torch.zeros(8 + int(longest), dtype=torch.uint8)
    shard[:8] = torch.tensor(list(len(raw).to_bytes(8, "little")), dtype=torch.uint8)
    shard[8 : 8 + len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    out = torch.empty(group.size * shard.numel(), dtype=torch.uint8, device=device)
    all_gather(out, shard.to(device), group, site="checkpoint")
    return [_decode(row) for row in out.cpu().view(group.size, -1)]


def agree(error: str | None, group: Group) -> str | None:
    """Join the ranks' error messages: None when no rank failed, else the same text on all ranks."""
    return joined_errors(exchange(error, group), group)


def joined_errors(errors: list[str | None], group: Group) -> str | None:
    """One text from the errors of all ranks; names ranks only when there are several."""
    failed = [(group.ranks[i], text) for i, text in enumerate(errors) if text is not None]
    if not failed:
        return None
    if group.size == 1:
        return failed[0][1]
    lines = [f"rank {rank}: {text}" for rank, text in failed[:8]]
    return "\n".join([*lines, f"... and {len(failed) - 8} more ranks"] if len(failed) > 8 else lines)


def _decode(row: Tensor) -> Any:
    num_bytes = int.from_bytes(bytes(row[:8].tolist()), "little")
    return json.loads(zlib.decompress(row[8 : 8 + num_bytes].numpy().tobytes()))


def _device(group: Group) -> torch.device:
    """Where the group's backend wants its tensors."""
    if "nccl" in dist.get_backend(group.pg):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
