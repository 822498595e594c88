"""A small model's state cut as (dp, tp) ranks would hold it, for the checkpoint tests.

Written apart from megalite.model. It has what makes checkpoints hard: fused qkv with fewer kv heads than tp, fused gate
and up, replicated norms, and a vocabulary that tp does not divide.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint.save import save
from megalite.mesh import Group
from megalite.parallel.spec import Part, Piece

D, N, K, H, F, V = 8, 4, 2, 4, 12, 11
SHAPES = {
    "embedding.word.weight": (V, D),
    "layers.0.attention_norm.weight": (D,),
    "layers.0.attention.q.weight": (N * H, D),
    "layers.0.attention.k.weight": (K * H, D),
    "layers.0.attention.v.weight": (K * H, D),
    "layers.0.attention.out.weight": (D, N * H),
    "layers.0.mlp.gate.weight": (F, D),
    "layers.0.mlp.up.weight": (F, D),
    "layers.0.mlp.down.weight": (D, F),
}
KINDS = ("main", "exp_avg", "exp_avg_sq")
ALONE = Group("world")
PADDING = -7.5

Tensors = dict[str, dict[str, Tensor]]
State = dict[str, list[Piece]]


@dataclass
class Shard:
    """What one rank holds: a flat buffer per kind, and its pieces as views of them."""

    buffers: dict[str, Tensor]
    state: State
    num_padding: int


def random_tensors(seed: int, *, dtype: torch.dtype = torch.float32, kinds: tuple[str, ...] = KINDS) -> Tensors:
    """Logical tensors of every kind, all different."""
    generator = torch.Generator().manual_seed(seed)
    return {k: {n: torch.randn(s, generator=generator, dtype=dtype) for n, s in SHAPES.items()} for k in kinds}


def parts(tp: int, rank: int) -> list[tuple[list[Part], int]]:
    """For each local parameter: its parts, and elements of padding after them."""
    vocab = -(-V // tp)
    rows = max(min(V - rank * vocab, vocab), 0)
    word = Part("embedding.word.weight", (V, D), (min(rank * vocab, V), 0), (rows, D))
    norm = Part("layers.0.attention_norm.weight", (D,), (0,), (D,), num_replicas=tp, replica=rank)
    q = _rows("layers.0.attention.q.weight", tp, rank)
    k, v = (_kv(f"layers.0.attention.{x}.weight", tp, rank) for x in "kv")
    gate, up = (_rows(f"layers.0.mlp.{x}.weight", tp, rank) for x in ("gate", "up"))
    out, down = (_columns(name, tp, rank) for name in ("layers.0.attention.out.weight", "layers.0.mlp.down.weight"))
    local = [[word], [norm], [q, k, v], [out], [gate, up], [down]]
    return [(p, (vocab - rows) * D if p == [word] else 0) for p in local]


def _rows(name: str, tp: int, rank: int) -> Part:
    rows, columns = SHAPES[name]
    return Part(name, (rows, columns), (rank * rows // tp, 0), (rows // tp, columns))


def _columns(name: str, tp: int, rank: int) -> Part:
    rows, columns = SHAPES[name]
    return Part(name, (rows, columns), (0, rank * columns // tp), (rows, columns // tp))


def _kv(name: str, tp: int, rank: int) -> Part:
    if tp <= K:
        return _rows(name, tp, rank)
    replicas = tp // K
    return Part(name, SHAPES[name], (rank // replicas * H, 0), (H, D), replicas, rank % replicas)


def shard(tensors: Tensors, *, tp: int, dp: int, tp_rank: int, dp_rank: int) -> Shard:
    """One rank's shard, filled: parameters flattened one after the other, cut in dp equal runs, padding marked."""
    layout, end = [], 0
    for local, padding in parts(tp, tp_rank):
        for part in local:
            layout.append((end, part))
            end += torch.Size(part.shape).numel()
        end += padding
    length = -(-end // dp)
    low, high = dp_rank * length, (dp_rank + 1) * length
    buffers, state, used = {}, {}, 0
    for kind, logical in tensors.items():
        dtype = next(iter(logical.values())).dtype
        buffers[kind], state[kind], used = torch.full((length,), PADDING, dtype=dtype), [], 0
        for begin, part in layout:
            values = logical[part.name][tuple(slice(a, a + n) for a, n in zip(part.start, part.shape, strict=True))]
            a, b = max(begin, low), min(begin + values.numel(), high)
            if a < b:
                view = buffers[kind][a - low : b - low]
                view.copy_(values.reshape(-1)[a - begin : b - begin])
                state[kind].append(Piece(part, a - begin, view))
                used += b - a
    return Shard(buffers, state, length - used)


def shards(tensors: Tensors, *, tp: int, dp: int) -> list[Shard]:
    """All ranks' shards, tp fastest."""
    return [shard(tensors, tp=tp, dp=dp, tp_rank=t, dp_rank=d) for d in range(dp) for t in range(tp)]


def joined(all_shards: list[Shard]) -> State:
    """All ranks' pieces as one state, to be saved by a single process."""
    kinds = all_shards[0].state
    return {kind: [piece for one in all_shards for piece in one.state[kind]] for kind in kinds}


def blank(one: Shard) -> None:
    """Overwrite the values, but not the padding."""
    for pieces in one.state.values():
        for piece in pieces:
            piece.data.fill_(float("nan"))


def save_alone(root: Path, step: int, tensors: Tensors, *, tp: int = 1, dp: int = 1, keep_last: int = 0) -> Path:
    """Save a state as (dp, tp) shards from this process."""
    state = joined(shards(tensors, tp=tp, dp=dp))
    return save(root, step, state, group=ALONE, owner=True, meta={"step": step}, keep_last=keep_last)
