"""The protocols of the fused GEMMs over a symmetric heap: AG+GEMM (push), GEMM+RS (pull), GEMM+AR (two-shot).

Call n = 0, 1, ...; epoch e = n + 1; buffer n % 2. Flags of rank r that rank s writes: ("READY", r, s), ("DONE", r, s),
("RESULT", r, s). What a rank sends to another is in pieces, one per block, so that a copy is no single step. Each
planted fault of `FAULTS` takes one rule away.
"""

from dataclasses import dataclass

from tests.protocols.explore import MODULUS, Step, System

FAULTS = {
    "flags reset": "READY is 0 or 1 and the reader clears it",
    "one buffer": "every call uses buffer 0",
    "no done wait": "a writer does not wait for its readers of two calls before",
    "relaxed release": "a flag may be seen before the data that it announces",
    "producer needs an SM": "copies need a slot (RS, AR: a GEMM may start before the reduction it waits for)",
    "wrong buffer": "the reader takes the other buffer",
    "done early": "DONE is sent before the last read",
    "unsigned compare": "epochs are compared as unsigned numbers",
}


@dataclass(frozen=True)
class Case:
    """One protocol at one size."""

    size: int
    calls: int = 3
    blocks: int = 2
    """Of a GEMM; each has its piece of the rows."""
    slots: int = 2
    """Blocks of a GPU that are resident at once."""
    fault: str = ""
    first_epoch: int = 1
    """Of call 0: near the modulus, so that the epochs wrap."""

    def epoch(self, call: int) -> int:
        """Flags' value for a call."""
        return (self.first_epoch + call) % MODULUS

    def buffer(self, call: int) -> int:
        """The buffer of a call."""
        return 0 if self.fault == "one buffer" else call % 2

    def system(self) -> System:
        """No actors yet; the flags hold the epoch before the first call."""
        start = 0 if self.fault == "flags reset" else (self.first_epoch - 1) % MODULUS
        ranks = range(self.size)
        before = (self.first_epoch - 1) % MODULUS
        first = {(what, r, s): before for what in ("DONE", "RESULT") for r in ranks for s in ranks}
        first |= {("READY", r, s): start for r in ranks for s in ranks}
        return System(slots={("gpu", r): self.slots for r in ranks}, first=first)

    def wait(self, name: tuple, call: int) -> list[Step]:
        """Until the flag has reached a call, in this case's manner; calls before the first are always over."""
        if self.fault == "flags reset" and name[0] == "READY":
            return [Step("equal", name, 1), Step("set", name, 0)]
        return [Step("plain_wait" if self.fault == "unsigned compare" else "wait", name, self.epoch(call))]

    def announce(self, name: tuple, call: int, *, blocks: int = 1) -> Step:
        """Set a flag to a call; the last of several blocks does it."""
        value = 1 if self.fault == "flags reset" and name[0] == "READY" else self.epoch(call)
        return Step("count", name, value, blocks) if blocks > 1 else Step("set", name, value)

    def wait_done(self, rank: int, peer: int, call: int) -> list[Step]:
        """Until `peer` has finished reading the buffer's last content."""
        return [] if self.fault == "no done wait" else self.wait(("DONE", rank, peer), call - 2)

    def read_buffer(self, call: int) -> int:
        """The buffer that readers take."""
        return (call + 1) % 2 if self.fault == "wrong buffer" else self.buffer(call)


def send(system: System, case: Case, name: str, writes: list[Step], flag: Step) -> list[Step]:
    """Writes and the flag that releases them; relaxed, the writes go their own way from here."""
    if case.fault != "relaxed release":
        return [*writes, flag]
    go = ("go", name)
    system.add(f"stores of {name}", [Step("wait", go, 1), *writes])
    return [Step("set", go, 1), flag]


def gather_gemm(case: Case, *, behind: bool = False) -> System:
    """AG+GEMM: a copy engine pushes the own shard to each peer; the GEMM takes the shards as they come.

    Args:
        behind: a call's copies start behind the call before on the GEMM's stream, else only behind its copies.
    """
    system = case.system()
    needs_slot = case.fault == "producer needs an SM"
    for rank in range(case.size):
        ring = [(rank + turn) % case.size for turn in range(1, case.size)]
        for call in range(case.calls):
            copies = []
            for peer in reversed(ring):
                writes = [
                    Step("write", ("rows", peer, case.buffer(call), rank, piece), call + 1)
                    for piece in range(case.blocks)
                ]
                ready = case.announce(("READY", peer, rank), call)
                copies += case.wait_done(rank, peer, call)
                copies += send(system, case, f"copy {rank}->{peer} call {call}", writes, ready)
            before = [f"copies {rank} call {call - 1}"] if call else []
            before += [f"done {rank} call {call - 1}"] if call and behind else []
            gpu = ("gpu", rank) if needs_slot else None
            system.add(f"copies {rank} call {call}", copies, after=before, gpu=gpu)
            _gather_blocks(system, case, rank, ring, call)
    return system


def _gather_blocks(system: System, case: Case, rank: int, ring: list[int], call: int) -> None:
    """The GEMM's blocks, each with its piece of every shard, and what follows on their stream."""
    done = [case.announce(("DONE", peer, rank), call) for peer in ring]
    blocks = []
    before = [f"done {rank} call {call - 1}"] if call else []
    for block in range(case.blocks):
        steps = []
        for source in ring:  # the own shard is read from the input
            if case.fault != "flags reset":
                steps += case.wait(("READY", rank, source), call)
            elif block == 0:  # one block clears the flag for all
                steps += [*case.wait(("READY", rank, source), call), Step("set", ("come", rank, source, call), 1)]
            else:
                steps += [Step("wait", ("come", rank, source, call), 1)]
            steps += [Step("read", ("rows", rank, case.read_buffer(call), source, block), call + 1)]
        if case.fault == "done early" and block == 0:
            steps = [*steps[:-1], *done, steps[-1]]
        blocks.append(system.add(f"gemm {rank}.{block} call {call}", steps, after=before, gpu=("gpu", rank)))
    system.add(f"done {rank} call {call}", [] if case.fault == "done early" else done, after=blocks)


def gemm_reduce(case: Case, *, all_reduce: bool, own_stream: bool = True) -> System:
    """GEMM+RS, or GEMM+AR: tiles go into the local buffer, the next rank's first; owners pull and add in rank order.

    Args:
        own_stream: the reduction does not hold up the next GEMM, only the one after that (an event; it may need the
                    slots that a GEMM would keep while it waits for DONE). Else all is on one stream.
    """
    system = case.system()
    for rank in range(case.size):
        for call in range(case.calls):
            before = [f"reduce {rank} call {call - 1}"] if call and not own_stream else []
            if own_stream and call:
                before += [f"gemm {rank}.{block} call {call - 1}" for block in range(case.blocks)]
            if own_stream and call >= 2 and case.fault != "producer needs an SM":
                before += [f"reduce {rank} call {call - 2}"]
            waits = [step for peer in range(case.size) for step in case.wait_done(rank, peer, call)]
            blocks = [_tile_block(system, case, rank, block, call, before, waits) for block in range(case.blocks)]
            before = [f"reduce {rank} call {call - 1}"] if call else []
            steps = _pull(case, rank, call)
            if all_reduce:
                steps += [*_hand_out(system, case, rank, call), *_collect(case, rank, call)]
            steps = _with_done(case, rank, call, steps)
            system.add(f"reduce {rank} call {call}", steps, after=[*blocks, *before], gpu=("gpu", rank))
    return system


def gemm_reduce_resident(case: Case, *, all_reduce: bool) -> System:
    """The same in one launch: some of its blocks pull while the others multiply; begin, launch and finish on one
    stream. Blocks start in any order; there must be a slot that no pulling block takes."""
    system = case.system()
    pulling = case.slots if case.fault == "producer needs an SM" else 1
    for rank in range(case.size):
        for call in range(case.calls):
            waits = [step for peer in range(case.size) if peer != rank for step in case.wait_done(rank, peer, call)]
            before = [f"finish {rank} call {call - 1}"] if call else []
            begin = [system.add(f"begin {rank} call {call}", waits, after=before, gpu=("gpu", rank))]
            launch = [_tile_block(system, case, rank, block, call, begin, []) for block in range(case.blocks)]
            steps = _pull(case, rank, call)
            if all_reduce:
                steps += _hand_out(system, case, rank, call)
            elif case.fault == "done early":
                steps = _with_done(case, rank, call, steps)
            names = [f"pull {rank}.{number} call {call}" for number in range(pulling)]
            launch += [system.add(name, steps, after=begin, gpu=("gpu", rank)) for name in names]
            last = _collect(case, rank, call) if all_reduce else []
            if all_reduce or case.fault != "done early":
                last = _with_done(case, rank, call, last)
            system.add(f"finish {rank} call {call}", last, after=launch, gpu=("gpu", rank))
    return system


def _tile_block(
    system: System, case: Case, rank: int, block: int, call: int, before: list[str], waits: list[Step]
) -> str:
    """A block of the GEMM: its piece of every owner's rows, the own rows last."""
    steps = list(waits)
    for owner in ((rank + turn) % case.size for turn in range(1, case.size + 1)):
        write = Step("write", ("tiles", rank, case.buffer(call), owner, block), call + 1)
        ready = case.announce(("READY", owner, rank), call, blocks=case.blocks)
        steps += send(system, case, f"tile {rank}.{block}->{owner} call {call}", [write], ready)
    return system.add(f"gemm {rank}.{block} call {call}", steps, after=before, gpu=("gpu", rank))


def _pull(case: Case, rank: int, call: int) -> list[Step]:
    """Wait for each rank's tiles and read them."""
    steps: list[Step] = []
    for source in range(case.size):
        steps += case.wait(("READY", rank, source), call)
        for piece in range(case.blocks):
            steps.append(Step("read", ("tiles", source, case.read_buffer(call), rank, piece), call + 1))
    return steps


def _hand_out(system: System, case: Case, rank: int, call: int) -> list[Step]:
    """Write the reduced rows into everyone's result."""
    steps: list[Step] = []
    for peer in range(case.size):
        write = Step("write", ("result", peer, case.buffer(call), rank), call + 1)
        result = case.announce(("RESULT", peer, rank), call)
        steps += send(system, case, f"result {rank}->{peer} call {call}", [write], result)
    return steps


def _collect(case: Case, rank: int, call: int) -> list[Step]:
    """Wait for each owner's rows and read them."""
    steps: list[Step] = []
    for owner in range(case.size):
        steps += case.wait(("RESULT", rank, owner), call)
        steps += [Step("read", ("result", rank, case.read_buffer(call), owner), call + 1)]
    return steps


def _with_done(case: Case, rank: int, call: int, steps: list[Step]) -> list[Step]:
    done = [case.announce(("DONE", peer, rank), call) for peer in range(case.size)]
    return [*steps[:-1], *done, *steps[-1:]] if case.fault == "done early" else [*steps, *done]
