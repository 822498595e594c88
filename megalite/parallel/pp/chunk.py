"""One stage on this rank: runs its chain of links forward and backward, link by link.

Every link's input is detached, so a backward visits one link at a time: that is where parameters are gathered, freed
and reduced, and why no autograd hooks are needed. Full recompute is a link whose forward kept nothing but its input.
A split backward (I, then W) puts the weight gradients of blocks off; embedding and head, which begin and end the chain,
do theirs at once.

[Note: the embedding goes first] A backward that ends with the embedding and reduces behind each link makes the weight
gradients of the first block last: the reduction of the embedding, often the largest, is then under way meanwhile, and
only the block's own is left for the end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from megalite.batch import Microbatch

Reduce = Literal["no", "part", "last"]
"""Whether gradients are reduced behind a backward: links as they are done; `last`: nothing is added in this step."""


class LinkHooks(Protocol):
    """What happens around a link; `position` indexes the chunk's links."""

    def before_forward(self, position: int) -> None: ...
    def after_forward(self, position: int) -> None: ...
    def before_backward(self, position: int, weights: bool) -> None: ...
    def after_backward(self, position: int, weights: bool) -> None: ...
    def before_weights(self, position: int) -> None: ...
    def reduce(self, position: int, last: bool) -> None: ...


@dataclass
class Kept:
    """One link's forward that waits for its backward. `output` is None when the link is to be recomputed."""

    input: Tensor | None
    output: Tensor | None


class Chunk:
    """A stage's links with the forwards that are in flight."""

    def __init__(self, stage: int, links: Sequence[nn.Module], hooks: LinkHooks):
        self.stage = stage
        self.links = links
        self.hooks = hooks
        self.in_flight: dict[int, tuple[Microbatch, list[Kept]]] = {}
        self.deferred: dict[int, list[list[Callable[[], object]]]] = {}
        """Microbatch -> per link, the weight gradients that its I has put off."""

    def forward(self, mb: int, x: Tensor | None, batch: Microbatch, *, train: bool) -> Tensor:
        """Run the chain on one microbatch; with `train`, keep what backward(mb) needs. Returns a tensor without
        graph."""
        kept: list[Kept] = []
        for position, link in enumerate(self.links):
            self.hooks.before_forward(position)
            x = x.detach().requires_grad_(train) if x is not None else None
            with torch.set_grad_enabled(train and not self._recomputes(position)):
                output = link(x, batch)
            kept.append(Kept(x, None if self._recomputes(position) else output))
            x = output
            self.hooks.after_forward(position)
        if train:
            self.in_flight[mb] = (batch, kept)
        return x.detach()

    def backward(self, mb: int, grad: Tensor, *, reduce: Reduce) -> Tensor | None:
        """Run the chain backwards from the gradient of its output; returns that of its input (None at the first
        stage)."""
        return self._backward(mb, grad, split=False, reduce=reduce)

    def backward_input(self, mb: int, grad: Tensor) -> Tensor | None:
        """As `backward`, with the weight gradients of blocks put off until `backward_weights`; nothing is reduced."""
        self.deferred[mb] = [[] for _ in self.links]
        return self._backward(mb, grad, split=True, reduce="no")

    def backward_weights(self, mb: int, *, reduce: Reduce) -> None:
        """Make the weight gradients that `backward_input` has put off, last link first."""
        queues = self.deferred.pop(mb)
        for position in reversed(range(len(self.links))):
            if self._is_block(position):
                self._weights(position, queues[position])
            if reduce != "no":
                self.hooks.reduce(position, reduce == "last")

    def _backward(self, mb: int, grad: Tensor, *, split: bool, reduce: Reduce) -> Tensor | None:
        batch, kept = self.in_flight.pop(mb)
        late = 1 if reduce != "no" and self._first_is_embedding() else None
        if late is not None:
            self.deferred[mb] = [[] for _ in self.links]
        for position in reversed(range(len(self.links))):
            entry = kept.pop()
            defer = position == late or (split and self._is_block(position))
            self.hooks.before_backward(position, weights=not defer)
            output = entry.output
            if output is None:
                with torch.enable_grad():
                    output = self.links[position](entry.input, batch)
            if defer:
                self._defer(position, self.deferred[mb][position])
            torch.autograd.backward(output, grad)
            if defer:
                self._defer(position, None)
            grad = entry.input.grad if entry.input is not None else None
            del output, entry
            self.hooks.after_backward(position, weights=not defer)
            if reduce != "no" and position != late:
                self.hooks.reduce(position, reduce == "last")
        if late is not None:
            self._weights(late, self.deferred.pop(mb)[late])
            self.hooks.reduce(late, reduce == "last")
        return grad

    def _weights(self, position: int, queue: list[Callable[[], object]]) -> None:
        self.hooks.before_weights(position)
        with torch.no_grad():
            _drain(queue)

    def _first_is_embedding(self) -> bool:
        """See [Note: the embedding goes first]."""
        return len(self.links) > 1 and not self._is_block(0) and self._is_block(1)

    def _defer(self, position: int, queue: list | None) -> None:
        """Say where the link's parameters put their gradients: see kernels/wgrad, [Note: deferred gradients]."""
        for param in self._params[position]:
            param.deferred = queue

    @cached_property
    def _params(self) -> list[list[nn.Parameter]]:
        return [list(link.parameters()) for link in self.links]

    def _recomputes(self, position: int) -> bool:
        """Blocks only; the head's output is its loss, whose backward follows at once at the last stage."""
        return getattr(self.links[position], "recomputes", False)

    def _is_block(self, position: int) -> bool:
        return getattr(self.links[position], "recomputable", False)


def _drain(queue: list[Callable[[], object]]) -> None:
    """Make the calls in the order in which they came; each lets go of its tensors before the next one."""
    queue.reverse()
    while queue:
        queue.pop()()
