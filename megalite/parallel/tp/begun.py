"""Tp layers in two halves, so that another part of the microbatch computes while a collective is on its way.

A layer's `begin` starts its collective, or computes up to it, and returns how to finish. Each half is a node of
autograd's: in backward the second starts the collective's adjoint and the first waits for it. Since autograd goes
through nodes in the reverse order of forward, parts that take turns in forward (`in_turns`) do so in backward, and what
is on its way runs under the computation of the other parts there, too.
Invariant: all ranks of a group start the same collectives in the same order; what is on its way is kept alive and is
changed by nobody.
Reference: Wang et al., arXiv:2409.15241 (parts of the batch whose communication runs under one another).
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalite.comm.collectives import DONE, Work, all_gather
from megalite.kernels.wgrad import accumulate_bias
from megalite.parallel.tp.rows import TensorParallel, start_reduce_rows

Finish = Callable[[], Tensor]
Steps = Generator[None, None, Tensor]
"""A part's forward: yields when a collective is on its way, returns the result."""


def in_turns(parts: Sequence[Steps]) -> list[Tensor]:
    """Advance every part from one collective to the next, part after part, until all are through."""
    results: list[Tensor | None] = [None] * len(parts)
    waiting = dict(enumerate(parts))
    while waiting:
        for index, part in list(waiting.items()):
            try:
                next(part)
            except StopIteration as done:
                results[index] = done.value
                del waiting[index]
    return results


@dataclass
class OnItsWay:
    """What the halves of one collective share: the first in forward is the last in backward."""

    tp: TensorParallel
    site: str
    work: Work | None = None
    result: Tensor | None = None
    sent: Tensor | None = None
    """Kept until the wait."""
    left: tuple[Tensor, ...] = ()
    """What the second half leaves to the first in backward."""

    def gather(self, shard: Tensor, which: str) -> Tensor:
        """Start to collect all rows; they are there after the wait. Without sequence parallel they are already."""
        self.sent = shard.contiguous()
        if not self.tp.sequence_parallel:
            self.work, self.result = DONE, self.sent.view_as(self.sent)  # autograd must not see the input come back
            return self.result
        self.result = shard.new_empty(shard.shape[0] * self.tp.size, *shard.shape[1:])
        site = f"{self.site}.{which}"
        self.work = all_gather(self.result, self.sent, self.tp.group, site=site, async_op=True)
        return self.result

    def reduce(self, partial: Tensor, which: str) -> Tensor:
        """Start to sum the ranks' partial sums; this rank's rows are there after the wait."""
        self.sent = partial.contiguous()
        self.work, self.result = start_reduce_rows(self.sent, self.tp, site=f"{self.site}.{which}")
        return self.result

    def take_left(self) -> tuple[Tensor, ...]:
        """`left`, which is forgotten."""
        left, self.left = self.left, ()
        return left

    def wait(self) -> Tensor:
        """What was started last."""
        self.work.wait()
        result, self.work, self.result, self.sent = self.result, None, None, None
        return result


def way_of(tp: TensorParallel, site: str) -> OnItsWay:
    """For one collective of the group; for parts that take turns by its process group, since nothing can run under a
    call of a local channel."""
    return OnItsWay(replace(tp, group=replace(tp.group, local=None)) if tp.begins else tp, site)


class StartGather(torch.autograd.Function):
    """Rows of all ranks, not there yet; in backward the sum of the partial sums that its reader has started."""

    @staticmethod
    def forward(ctx, x, way):
        ctx.way = way
        return way.gather(x, "forward")

    @staticmethod
    def backward(ctx, partial):
        return ctx.way.wait(), None


class FinishGather(torch.autograd.Function):
    """The rows that StartGather began to collect; in backward starts to sum the ranks' partial sums."""

    @staticmethod
    def forward(ctx, full, way):
        ctx.way = way
        way.wait()
        return full.view_as(full)

    @staticmethod
    def backward(ctx, partial):
        ctx.way.reduce(partial, "backward")
        return partial, None


class FinishReduce(torch.autograd.Function):
    """This rank's rows of a sum that was started, and a bias; in backward starts to gather the gradient's rows."""

    @staticmethod
    def forward(ctx, own, bias, way):
        ctx.way, ctx.bias = way, bias
        way.wait()
        ctx.mark_dirty(own)
        return own if bias is None else own.add_(bias)

    @staticmethod
    def backward(ctx, dy):
        ctx.way.gather(dy, "backward")
        return dy, None if ctx.bias is None else accumulate_bias(ctx.bias, dy), None
