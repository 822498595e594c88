"""The protocol of the symmetric collectives (csrc/include/exchange.cuh): two buffers, one flag per peer and channel.

A rank's channel takes steps e = 1, 2, ...: write into the peers' buffer e % 2, set their flag to e, wait for all peers'
flags, read the own buffer. Several calls of several steps follow each other on a rank's stream; a call is a grid whose
block c serves channel c. A `switched` call takes two steps on one buffer, as the multimem kernel does.
"""

from dataclasses import dataclass

from tests.protocols.explore import MODULUS, Step, System

FAULTS = {
    "flags reset": "flags are 0 or 1 and the reader clears them",
    "one buffer": "every step uses buffer 0",
    "no wait": "a rank reads without waiting for its peers",
    "relaxed release": "a flag may be seen before the data that it announces",
    "announced early": "a rank sets its flags for the next step before its last read",
    "wrong buffer": "the reader takes the other buffer",
    "unsigned compare": "epochs are compared as unsigned numbers",
    "any order": "with fewer slots than blocks, and blocks that start in any order",
}


@dataclass(frozen=True)
class Case:
    """Some calls of one team."""

    size: int
    calls: tuple[str, ...] = ("plain", "plain", "plain")
    """plain: two steps each (two-shot; a long message); switched: two steps on one buffer."""
    channels: int = 1
    slots: int = 1
    fault: str = ""
    first_epoch: int = 1

    def flag(self, step: int) -> int:
        """What announces a step."""
        return 1 if self.fault == "flags reset" else (self.first_epoch + step) % MODULUS

    def buffer(self, step: int) -> int:
        """Where the writers of a step write."""
        return 0 if self.fault == "one buffer" else step % 2


class Channel:
    """The steps that block `channel` of rank `rank` takes in one call."""

    def __init__(self, case: Case, system: System, rank: int, channel: int, first: int):
        self.case, self.system, self.rank, self.channel = case, system, rank, channel
        self.peers = [(rank + turn) % case.size for turn in range(1, case.size)]
        self.step = first
        self.steps: list[Step] = []
        self.late: list[Step] = []

    def place(self, owner: int, source: int, step: int) -> tuple:
        """The slot of a source in a rank's buffer."""
        return ("slot", owner, self.channel, self.case.buffer(step), source)

    def announce(self) -> list[Step]:
        """Set the peers' flags."""
        return [Step("set", ("flag", p, self.rank, self.channel), self.case.flag(self.step)) for p in self.peers]

    def meet(self, writes: list[Step]) -> None:
        """Write, announce, wait for all."""
        if self.case.fault == "relaxed release":
            go = ("go", self.rank, self.channel, self.step)
            self.system.add(f"stores {go}", [Step("wait", go, 1), *writes])
            writes = [Step("set", go, 1)]
        self.steps += [*writes, *self.announce(), *self.late]
        self.late = []
        for peer in self.peers:
            name = ("flag", self.rank, peer, self.channel)
            if self.case.fault == "flags reset":
                self.steps += [Step("equal", name, 1), Step("set", name, 0)]
            elif self.case.fault != "no wait":
                kind = "plain_wait" if self.case.fault == "unsigned compare" else "wait"
                self.steps.append(Step(kind, name, self.case.flag(self.step)))

    def read(self, sources: list[int], step: int, value: int) -> None:
        """The slots of some sources in the own buffer."""
        step += self.case.fault == "wrong buffer"
        reads = [Step("read", self.place(self.rank, source, step), value) for source in sources]
        if self.case.fault == "announced early":
            self.late = [reads.pop()]
        self.steps += reads

    def plain(self) -> None:
        """One exchange; values grow with the step."""
        value = 2 * self.step + 1
        self.meet([Step("write", self.place(peer, self.rank, self.step), value) for peer in self.peers])
        self.read(self.peers, self.step, value)
        self.step += 1

    def switched(self) -> None:
        """Put the own tensor into the next step's buffer; each part's owner reads and writes it everywhere."""
        ranks, buffer = range(self.case.size), self.step + 1
        value = 2 * buffer
        self.meet([Step("write", self.place(self.rank, part, buffer), value) for part in ranks])
        self.steps += [Step("read", self.place(owner, self.rank, buffer), value) for owner in ranks]
        self.step += 1
        self.meet([Step("write", self.place(owner, self.rank, buffer), value + 1) for owner in ranks])
        self.read(list(ranks), buffer, value + 1)
        self.step += 1


def collectives(case: Case) -> System:
    """All ranks' grids, one behind the other on each rank's stream; blocks start in their order."""
    before = 0 if case.fault == "flags reset" else (case.first_epoch - 1) % MODULUS
    ranks, channels = range(case.size), range(case.channels)
    system = System(
        slots={("gpu", rank): case.slots for rank in ranks},
        first={("flag", r, s, c): before for r in ranks for s in ranks for c in channels},
    )
    for rank in ranks:
        step, last = 0, []
        for call, kind in enumerate(case.calls):
            grid = []
            for number in channels:
                channel = Channel(case, system, rank, number, step)
                for _ in range(2 if kind == "plain" else 1):
                    getattr(channel, kind)()
                steps = [Step("set", ("began", rank, number, call), 1), *channel.steps, *channel.late]
                after = list(last)
                if number and case.fault != "any order":
                    gate = [Step("wait", ("began", rank, number - 1, call), 1)]
                    after.append(system.add(f"gate {rank}.{number} call {call}", gate))
                grid.append(system.add(f"block {rank}.{number} call {call}", steps, after=after, gpu=("gpu", rank)))
            step, last = channel.step, grid
    return system
