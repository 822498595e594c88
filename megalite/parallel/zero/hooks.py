"""The manager as one stage sees it: by link position, with prefetch along the chain and the lowered schedule's actions.

`reshard_after: forward` streams: one link is gathered while its neighbour runs, and freed behind it. The other
policies hold the whole stage between GATHER and RESHARD of the schedule.

[Note: where the chain turns] A backward may follow at once, which starts with the links that the forward ended with. So
a streamed forward leaves the last link to RESHARD, which the schedule has only where no backward follows. The link in
front of it stays too if the last one was prefetched: then both have had room, and the backward would gather it again
under the last link's backward, which may be short (a head that makes its gradients in its forward).
"""

from dataclasses import dataclass

from megalite.parallel.zero.manager import LinkUnits, ZeroManager


@dataclass
class StageHooks:
    """Implements parallel.pp's LinkHooks and StageActions for one stage."""

    manager: ZeroManager
    stage: int
    links: list[LinkUnits]
    streams: bool

    def __post_init__(self) -> None:
        for link in self.links:
            self.manager.knows_link(link)

    def before_forward(self, position: int) -> None:
        """Parameters of the link are ready after this; the next link's are on their way."""
        self.manager.before(self.links[position], self._at(position + 1))

    def after_forward(self, position: int) -> None:
        """Free the link if nothing holds it; see [Note: where the chain turns]."""
        if not self._stays(position):
            self.manager.after(self.links[position], self._at(position + 1))

    def _stays(self, position: int) -> bool:
        """Whether a link is left to RESHARD after its forward."""
        last = len(self.links) - 1
        before_last = position == last - 1 and self.links[position].backward_reads
        return position == last or (before_last and self.manager.is_live(self.links[last].reads))

    def before_backward(self, position: int, weights: bool) -> None:
        """What the link's backward needs is ready after this, and with `weights` its gradient buffers."""
        self.manager.before(self.links[position], self._at(position - 1), grads=weights, backward=True)

    def after_backward(self, position: int, weights: bool) -> None:
        """Take in what autograd left in `.grad`, free what nothing holds."""
        if weights:
            self.manager.collect(self.links[position])
        self.manager.after(self.links[position], self._at(position - 1), backward=True)

    def before_weights(self, position: int) -> None:
        """Gradient buffers of the link are ready after this; its parameters are not needed."""
        self.manager.ready_grads(self.links[position])

    def reduce(self, position: int, last: bool) -> None:
        """Begin to reduce the units whose gradient the link completes; after the `last` time nothing is added."""
        self.manager.reduce(self.links[position], last=last)

    def gather(self, *, backward: bool) -> None:
        """GATHER: begin with the link that the stage's next action runs first, or hold the whole stage.

        A streamed link waits while another stage runs, which needs room for its largest link.
        """
        links = list(reversed(self.links)) if backward else self.links
        if self.streams:
            for link in links[:1]:  # a stage may be empty
                self.manager.prefetch(link.needs(backward=backward), reserve=self.manager.largest_link_bytes)
        else:
            self.manager.hold(self.stage, [name for link in links for name in link.reads])

    def reshard(self) -> None:
        """RESHARD: nothing of this stage stays gathered, unless another stage on this rank holds it."""
        for link in self.links:
            self.manager.release(self.stage, link.reads)

    def _at(self, position: int) -> LinkUnits | None:
        return self.links[position] if 0 <= position < len(self.links) else None
