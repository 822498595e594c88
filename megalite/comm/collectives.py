"""Collectives on a mesh group: asynchronous, a no-op at size 1, every byte counted in the ledger.

Invariant: results do not depend on arrival order. A call goes through the group's local channel where there is one that
takes the tensors (then done when it returns, unless it is `exclusive`), else through the process group. gloo's own
reduce_scatter moves an all-reduce's bytes, so there a reduce-scatter is an all-to-all and a sum in rank order, which
sends (W-1)/W of the tensor and is deterministic. The ledger counts the same for every way.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from inspect import signature
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.comm.swap import Swap, can_swap
from megalite.mesh import Group

Op = Literal["sum", "max", "min"]
# torch 2.13 deprecates the older names, torch 2.11 has only those
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_NOTHING = nullcontext()
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass
class Work:
    """A collective on its way. `wait()` returns when the result may be read; call it once or more."""

    handle: dist.Work | Swap | None = None
    finish: Callable[[], None] | None = None
    group: Group | None = None
    name: str = ""
    """For traces; given with the group."""
    in_stream: bool = False
    """`wait` makes the stream wait, not the caller."""

    @property
    def done(self) -> bool:
        """Whether `wait` is known to return at once."""
        if self.handle is None:
            return self.finish is None
        return self.in_stream or self.handle.is_completed()

    def wait(self) -> None:
        """Block until the result is there (on a GPU: until this stream may read it)."""
        if self.handle is None and self.finish is None:
            return
        with _NOTHING if self.group is None else _span(self.group, f"wait {self.name}"):
            if self.handle is not None:
                self.handle.wait()
                self.handle = None
            if self.finish is not None:
                finish, self.finish = self.finish, None
                finish()


DONE = Work()
"""Of a call that is through when it returns."""


def _traced(collective: Callable[..., Work]) -> Callable[..., Work]:
    """The collective; what it started knows its name, and in a traced step the time is recorded that the call blocks
    for."""
    at = list(signature(collective).parameters).index("group")

    @wraps(collective)
    def call(*args, site: str = "", **kwargs) -> Work:
        group, name = args[at], site or collective.__name__
        if group.ledger.spans is None:
            work = collective(*args, site=site, **kwargs)
        else:
            with _span(group, name):
                work = collective(*args, site=site, **kwargs)
        if work is not DONE:
            work.group, work.name, work.in_stream = group, name, args[0].device.type != "cpu"
        return work

    return call


def _span(group: Group, name: str) -> AbstractContextManager[None]:
    spans = group.ledger.spans
    return _NOTHING if spans is None or group.size == 1 else spans.span(f"{name} {group.axis}", "collective")


@_traced
def all_reduce(tensor: Tensor, group: Group, *, op: Op = "sum", site: str = "", async_op: bool = False) -> Work:
    """Reduce `tensor` in place over the group.

    Communication: sends 2 * (W-1)/W of the tensor's bytes.
    """
    if group.size == 1 or tensor.numel() == 0:
        return DONE
    group.ledger.record(group.axis, "all_reduce", site, 2 * (group.size - 1) * tensor.nbytes // group.size)
    if _locally("all_reduce", group, site, (tensor,), op):
        return DONE
    handle = dist.all_reduce(tensor, op=_OPS[op], group=group.pg, async_op=True)
    return _started(Work(handle), async_op)


@_traced
def all_gather(out: Tensor, shard: Tensor, group: Group, *, site: str = "", async_op: bool = False) -> Work:
    """Concatenate the ranks' `shard`s along dim 0 into `out`, in rank order; `shard` may lie in its place in `out`.

    Communication: sends (W-1) times the shard's bytes.
    """
    if group.size == 1:
        if out.data_ptr() != shard.data_ptr():
            out.copy_(shard)
        return DONE
    group.ledger.record(group.axis, "all_gather", site, (group.size - 1) * shard.nbytes)
    if _locally("all_gather", group, site, (out, shard)):
        return DONE
    if can_swap(group, shard):
        return _started(_swap_gather(out, shard, group), async_op)
    handle = _all_gather_single(out, shard, group=group.pg, async_op=True)
    return _started(Work(handle), async_op)


@_traced
def reduce_scatter(
    out: Tensor, full: Tensor, group: Group, *, site: str = "", async_op: bool = False, exclusive: bool = False
) -> Work:
    """Sum the ranks' `full` tensors; rank r receives rows [r*n, (r+1)*n) of the sum in `out`.

    Args:
        exclusive: the caller makes no other call on these ranks before its wait, so that a local channel's call can be
            on its way, too, from here to there.

    Communication: sends (W-1)/W of `full`'s bytes.
    Numerics: on CPU ranks summed in rank order, bf16 and fp16 in fp32 with one rounding.
    Memory: on gloo one more tensor of `full`'s size until the wait (of `out`'s between two ranks).
    """
    if group.size == 1:
        if out.data_ptr() != full.data_ptr():
            out.copy_(full)
        return DONE
    group.ledger.record(group.axis, "reduce_scatter", site, (group.size - 1) * out.nbytes)
    if exclusive and async_op and group.local is not None and group.local.takes(out, full):
        finish = _at_site(site, group.local.begin_reduce_scatter, out, full)
        return DONE if finish is None else Work(finish=partial(_at_site, site, finish))
    if _locally("reduce_scatter", group, site, (out, full)):
        return DONE
    if full.device.type != "cpu":
        handle = _reduce_scatter_single(out, full, group=group.pg, async_op=True)
        return _started(Work(handle), async_op)
    if can_swap(group, out):
        return _started(_swap_reduce(out, full, group), async_op)
    received = torch.empty_like(full)
    handle = dist.all_to_all_single(received, full, group=group.pg, async_op=True)

    def finish() -> None:
        torch.sum(received.view(group.size, *out.shape), dim=0, out=out)

    return _started(Work(handle, finish), async_op)


@_traced
def broadcast(tensor: Tensor, group: Group, *, root: int = 0, site: str = "", async_op: bool = False) -> Work:
    """Copy `tensor` of the group's rank `root` to all its ranks, in place.

    Communication: the root sends the tensor's bytes (W-1) times.
    """
    if group.size == 1 or tensor.numel() == 0:
        return DONE
    sent = (group.size - 1) * tensor.nbytes if group.rank == root else 0
    group.ledger.record(group.axis, "broadcast", site, sent)
    if _locally("broadcast", group, site, (tensor,), root):
        return DONE
    handle = dist.broadcast(tensor, group.ranks[root], group=group.pg, async_op=True)
    return _started(Work(handle), async_op)


def _swap_gather(out: Tensor, shard: Tensor, group: Group) -> Work:
    """all_gather between two ranks."""
    parts = out.view(2, *shard.shape)
    swap = Swap(shard, parts[1 - group.rank], group)
    if parts[group.rank].data_ptr() != shard.data_ptr():
        parts[group.rank].copy_(shard)
    return Work(swap)


def _swap_reduce(out: Tensor, full: Tensor, group: Group) -> Work:
    """reduce_scatter between two ranks: a sum of two, in either order the same."""
    parts = full.view(2, *out.shape)
    received = torch.empty_like(parts[0])
    swap = Swap(parts[1 - group.rank], received, group)
    return Work(swap, lambda: torch.add(parts[group.rank], received, out=out))


def _locally(op: str, group: Group, site: str, tensors: tuple[Tensor, ...], *arguments: Any) -> bool:
    """Make the call through the group's channel if there is one that takes the tensors."""
    local = group.local
    if local is None or not local.takes(*tensors):
        return False
    _at_site(site, getattr(local, op), *tensors, *arguments)
    return True


def _at_site(site: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """What the call returns; a failure says at which call site."""
    try:
        return call(*arguments)
    except RuntimeError as error:
        error.add_note(f"at call site {site or '(unnamed)'}")
        raise


def _started(work: Work, async_op: bool) -> Work:
    if not async_op:
        work.wait()
    return work
