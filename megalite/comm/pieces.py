"""Collectives on rows that travel in pieces, so that a GEMM runs on what has arrived or while the last piece leaves.

Gathers and reduce-scatters are direct exchanges: in step d = 1 .. W-1 every rank swaps pieces with the ranks d ahead
and d behind, straight between where rows lie and where they belong, with nothing packed or copied. All ranks post the
same steps in the same order, so no message can wait for one of a later step.
Invariant: the ledger counts one call of the whole collective, with its bytes; sums run in rank order. Pieces go through
the process group also where `group` has a faster channel, which blocks.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.comm.collectives import Work
from megalite.mesh import Group


def piece_bounds(num_rows: int, num_pieces: int) -> list[slice]:
    """`num_pieces` runs of rows as equal as possible, longer ones first; at most one per row, at least one."""
    num_pieces = max(1, min(num_pieces, num_rows))
    size, longer = divmod(num_rows, num_pieces)
    ends = [size * (i + 1) + min(i + 1, longer) for i in range(num_pieces)]
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _shifted(rows: slice, by: int) -> slice:
    return slice(rows.start + by, rows.stop + by)


def _receives_first(tensor: Tensor) -> bool:
    """Whether receives are announced before anything is sent: on gloo, see [Note: receives first] in swap.py. NCCL
    starts messages in the order of their posting, so there each receive goes with the send of its step."""
    return tensor.device.type == "cpu"


class _Swap:
    """A message from one rank of the group and, from `start` on, one to another."""

    def __init__(self, group: Group, *, receive: Tensor, source: int, to: int, tag: int, site: str):
        self._group, self._site, self._tag = group, site, tag
        self._receive, self._source, self._to = receive, group.ranks[source], group.ranks[to]
        self._works: list[Work] = []
        self._announced = _receives_first(receive)
        if self._announced:
            self._add(dist.irecv(receive, self._source, group=group.pg, tag=tag))

    def start(self, send: Tensor) -> None:
        """Send; nobody may change the tensor before `finish`."""
        pg, tag = self._group.pg, self._tag
        if self._announced:
            self._add(dist.isend(send, self._to, group=pg, tag=tag))
            return
        both = [
            dist.P2POp(dist.irecv, self._receive, self._source, pg, tag),
            dist.P2POp(dist.isend, send, self._to, pg, tag),
        ]
        for work in dist.batch_isend_irecv(both):  # one work may stand for both
            self._add(work)

    def received(self) -> None:
        """Wait until what was received may be read."""
        self._works[0].wait()

    def finish(self) -> None:
        """Wait until what was sent may be changed, too."""
        for work in self._works:
            work.wait()

    def _add(self, handle: dist.Work) -> None:
        self._works.append(Work(handle, group=self._group, name=self._site))


class RowGather:
    """All-gather of each rank's rows, begun when it is made; `full` (W * n, ...) has the shards (n, ...) in rank order.

    Communication: sends (W-1) times the shard's bytes.
    """

    def __init__(self, shard: Tensor, group: Group, *, site: str, num_pieces: int):
        num_rows, size, rank = shard.shape[0], group.size, group.rank
        pieces = piece_bounds(num_rows, num_pieces)
        group.ledger.record(group.axis, "all_gather", site, (size - 1) * shard.nbytes)
        self.full = shard.new_empty(size * num_rows, *shard.shape[1:])
        self.own = slice(rank * num_rows, (rank + 1) * num_rows)
        self._swaps: list[tuple[slice, _Swap]] = []
        steps = [(step, tag, piece) for step in range(1, size) for tag, piece in enumerate(pieces)]
        for step, tag, piece in steps:
            source, to = (rank + step) % size, (rank - step) % size
            rows = _shifted(piece, source * num_rows)
            swap = _Swap(group, receive=self.full[rows], source=source, to=to, tag=tag, site=site)
            self._swaps.append((rows, swap))
        for (_, _, piece), (_, swap) in zip(steps, self._swaps, strict=True):
            swap.start(shard[piece])
        self.full[self.own] = shard

    def arrivals(self) -> Iterator[slice]:
        """Rows of `full` of the other ranks, piece by piece, each when it may be read."""
        for rows, swap in self._swaps:
            swap.received()
            yield rows

    def others(self) -> list[slice]:
        """All rows of `full` but the own ones, in at most two runs."""
        runs = [slice(0, self.own.start), slice(self.own.stop, self.full.shape[0])]
        return [rows for rows in runs if rows.start < rows.stop]

    def finish(self) -> Tensor:
        """The whole `full`; afterwards the shard may be changed."""
        for _, swap in self._swaps:
            swap.finish()
        return self.full


class RowReduceScatter:
    """Sum over ranks of rows that are computed piece by piece; rank r receives rows [r*n, (r+1)*n) of the sum.

    Communication: sends (W-1)/W of the partial sums' bytes.
    Numerics: summed in rank order; 16-bit dtypes in fp32, rounded once.
    Memory: (2 W - 1) times the result until `finish`.
    """

    def __init__(self, shape: tuple[int, int], like: Tensor, group: Group, *, site: str, num_pieces: int):
        """`shape` (W * n, columns) of the partial sums; dtype and device of `like`."""
        size, (num_rows, columns) = group.size, (shape[0] // group.size, shape[1])
        assert num_rows * size == shape[0], f"{shape[0]} rows do not divide by {size} ranks"
        self._group, self._num_rows = group, num_rows
        self._pieces = piece_bounds(num_rows, num_pieces)
        self._outgoing = like.new_empty(size - 1, num_rows, columns)
        self._parts = like.new_empty(size, num_rows, columns)
        """This rank's rows of every rank's partial sum."""
        self._swaps = [
            _Swap(group, receive=self._parts[source, piece], source=source, to=owner, tag=tag, site=site)
            for owner, source in self._steps()
            for tag, piece in enumerate(self._pieces)
        ]
        group.ledger.record(group.axis, "reduce_scatter", site, self._outgoing.nbytes)

    def _steps(self) -> list[tuple[int, int]]:
        """The rank to send to, and the one to receive from, of each step."""
        size, rank = self._group.size, self._group.rank
        return [((rank + step) % size, (rank - step) % size) for step in range(1, size)]

    def pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """(rows, where their partial sums are to be written) in the order to compute them, this rank's own last; a
        piece leaves when the next one is asked for."""
        swaps = iter(self._swaps)
        for step, (owner, _) in enumerate(self._steps()):
            for piece in self._pieces:
                out = self._outgoing[step, piece]
                yield _shifted(piece, owner * self._num_rows), out
                next(swaps).start(out)
        rank = self._group.rank
        yield slice(rank * self._num_rows, (rank + 1) * self._num_rows), self._parts[rank]

    def finish(self) -> Tensor:
        """This rank's rows of the sum (n, columns)."""
        total = torch.empty_like(self._parts[0])
        for index, piece in enumerate(self._pieces):
            for swap in self._swaps[index :: len(self._pieces)]:
                swap.received()
            torch.sum(self._parts[:, piece], dim=0, out=total[piece])
        for swap in self._swaps:
            swap.finish()
        return total


class RowAllReduce:
    """Sum over ranks of rows that are computed piece by piece, all of them on every rank.

    Communication: sends 2 * (W-1)/W of the partial sums' bytes.
    """

    def __init__(self, shape: tuple[int, int], like: Tensor, group: Group, *, site: str, num_pieces: int):
        """`shape` (rows, columns) of the partial sums; dtype and device of `like`. `num_pieces` as for a
        reduce-scatter: of each 1/W of the rows."""
        self._group, self._site = group, site
        self._total = like.new_empty(shape)
        self._pieces = piece_bounds(shape[0], group.size * num_pieces)
        self._works: list[Work] = []
        group.ledger.record(group.axis, "all_reduce", site, 2 * (group.size - 1) * self._total.nbytes // group.size)

    def pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """As RowReduceScatter's, in the order of the rows."""
        for rows in self._pieces:
            yield rows, self._total[rows]
            work = dist.all_reduce(self._total[rows], group=self._group.pg, async_op=True)
            self._works.append(Work(work, group=self._group, name=self._site))

    def finish(self) -> Tensor:
        """The sum (rows, columns)."""
        for work in self._works:
            work.wait()
        return self._total
