"""The proof that a lowered schedule trains what it should and ends, without running it.

`check` reads the lists and nothing of how they were made. It proves: every (stage, microbatch) is computed once, on its
rank, after its inputs; parameters are gathered where they are used; gradients are reduced as promised; every message
has both ends, in the same order on both ranks; and the lists end. The last is shown for the strictest machine: nothing
is buffered, all messages of a rank pass one queue in the order of its list, and a rank stands still at every SEND until
it is through. What ends there also ends when sends are posted without blocking and each pair of ranks has its own
queue; `blocking=False` checks only that. On both machines a message passes when it is first on both ranks, and a
computation waits for its RECV.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

from megalite.parallel.pp.actions import COMPUTE, MESSAGES, SENDS, Action, Op, partner
from megalite.parallel.pp.lower import Lowered


class ScheduleError(ValueError):
    """A schedule that would train something else, or never end."""


@dataclass(frozen=True)
class Report:
    """What a proved schedule needs, one number per pp rank.

    peak_live:     most (stage, microbatch) pairs between their forward and the end of their backward.
    peak_gathered: most stages whose parameters are gathered at once (0 below ZeRO stage 3).
    num_messages:  sends and receives.
    num_gathers:   gathers.
    num_reduces:   reductions.
    """

    peak_live: tuple[int, ...]
    peak_gathered: tuple[int, ...]
    num_messages: tuple[int, ...]
    num_gathers: tuple[int, ...]
    num_reduces: tuple[int, ...]


def check(lowered: Lowered, *, blocking: bool = True) -> Report:
    """Prove `lowered`, or raise with the excerpt of the lists that shows why not.

    Args:
        blocking: prove the end on the strictest machine (see the module); False: on the other one.

    Raises:
        ScheduleError: what is wrong, and the actions around it, marked.
    """
    readers = [_Reader(lowered, rank) for rank in range(lowered.schedule.pp)]
    for reader in readers:
        reader.read()
    _check_queues(lowered)
    _check_end(lowered, blocking)
    counts = [Counter(action.op for action in row) for row in lowered.actions]
    return Report(
        peak_live=tuple(reader.peak_live for reader in readers),
        peak_gathered=tuple(reader.peak_gathered for reader in readers),
        num_messages=tuple(sum(count[op] for op in MESSAGES) for count in counts),
        num_gathers=tuple(count[Op.GATHER] for count in counts),
        num_reduces=tuple(count[Op.REDUCE] for count in counts),
    )


@dataclass
class _Reader:
    """Reads one rank's list front to back and holds what is true at each point."""

    lowered: Lowered
    rank: int
    position: int = 0
    seen: set[Action] = field(default_factory=set)
    live: set[tuple[int, int | None]] = field(default_factory=set)
    gathered: set[int] = field(default_factory=set)
    unreduced: dict[int, set[int | None]] = field(default_factory=dict)
    backwards: Counter[int] = field(default_factory=Counter)
    peak_live: int = 0
    peak_gathered: int = 0

    def fail(self, why: str) -> None:
        """Raise with the current action marked."""
        excerpt = _excerpt(self.lowered, {self.rank: self.position})
        raise ScheduleError(f"{self.lowered.schedule.name}: {why}\n{excerpt}")

    def need(self, holds: bool, why: str) -> None:
        """Raise unless `holds`."""
        if not holds:
            self.fail(why)

    def read(self) -> None:
        """Check every action of the list, then that nothing is left open."""
        for position, action in enumerate(self.lowered.actions[self.rank]):
            self.position = position
            self.common(action)
            if action.op in COMPUTE:
                self.compute(action)
            elif action.op in MESSAGES:
                self.message(action)
            elif action.op is Op.REDUCE:
                self.reduce(action)
            else:
                self.gather_or_reshard(action)
            self.seen.add(action)
        self.position = len(self.lowered.actions[self.rank])
        self.end()

    def common(self, action: Action) -> None:
        """The stage is this rank's, the microbatch exists, and nothing but GATHER and RESHARD comes twice."""
        schedule = self.lowered.schedule
        self.need(0 <= action.stage < schedule.num_stages, f"{action}: there are {schedule.num_stages} stages")
        owner = schedule.stage_rank[action.stage]
        self.need(owner == self.rank, f"{action} on rank {self.rank}, but stage {action.stage} is on rank {owner}")
        in_range = action.mb is None or 0 <= action.mb < schedule.num_microbatches
        self.need(in_range, f"{action}: there are {schedule.num_microbatches} microbatches")
        again = action in self.seen and action.op not in (Op.GATHER, Op.RESHARD)
        self.need(not again, f"{action} a second time")

    def compute(self, action: Action) -> None:
        """Inputs are there, parameters are gathered, and the backward belongs to a forward."""
        stage, mb = action.stage, action.mb
        self.need(mb is not None, f"{action} has no microbatch")
        self.need(not (self.lowered.schedule.forward_only and action.op is not Op.F), f"{action} in a forward pass")
        if action.op is not Op.W:
            needs = self.input_of(action)
            self.need(needs is None or bool(needs & self.seen), f"{action} before its input {_names(needs)}")
            gathered = stage in self.gathered or self.lowered.zero_stage < 3
            self.need(gathered, f"{action} while stage {stage} is not gathered")
        if action.op is Op.F:
            self.live.add((stage, mb))
            self.peak_live = max(self.peak_live, len(self.live))
        else:
            self.backward(action)
        if self.lowered.schedule.forward_only:
            self.live.discard((stage, mb))

    def backward(self, action: Action) -> None:
        """One B, or one I then one W, behind the F."""
        stage, mb = action.stage, action.mb
        self.need((stage, mb) in self.live, f"{action} without a forward in flight")
        if action.op is Op.W:
            self.need(Action(Op.I, stage, mb) in self.seen, f"{action} before {stage}I{mb}")
        if action.op is Op.B:
            self.need(Action(Op.I, stage, mb) not in self.seen, f"{action} after {stage}I{mb}: the gradient twice")
        if action.op is not Op.I:
            self.live.remove((stage, mb))
            self.unreduced.setdefault(stage, set()).add(mb)
            self.backwards[stage] += 1

    def input_of(self, action: Action) -> set[Action] | None:
        """Actions of this rank, one of which provides the input; None where the batch or the loss does."""
        schedule, mb = self.lowered.schedule, action.mb
        before = action.stage - 1 if action.op is Op.F else action.stage + 1
        if not 0 <= before < schedule.num_stages:
            return None
        if schedule.stage_rank[before] != self.rank:
            return {Action(Op.RECV_F if action.op is Op.F else Op.RECV_B, action.stage, mb)}
        return {Action(op, before, mb) for op in ((Op.F,) if action.op is Op.F else (Op.B, Op.I))}

    def message(self, action: Action) -> None:
        """A message has another rank on its other end, and what is sent was computed."""
        schedule = self.lowered.schedule
        self.need(action.mb is not None, f"{action} has no microbatch")
        other = partner(action).stage
        self.need(0 <= other < schedule.num_stages, f"{action}: there is no stage {other}")
        self.need(schedule.stage_rank[other] != self.rank, f"{action}: stage {other} is on the same rank")
        if action.op in SENDS:
            made_by = (Op.F,) if action.op is Op.SEND_F else (Op.B, Op.I)
            made = {Action(op, action.stage, action.mb) for op in made_by}
            self.need(bool(made & self.seen), f"{action} before {_names(made)}")

    def gather_or_reshard(self, action: Action) -> None:
        """Gathers and frees come in turn, and only where parameters are sharded."""
        self.need(action.mb is None, f"{action} takes no microbatch")
        self.need(self.lowered.zero_stage == 3, f"{action} at ZeRO stage {self.lowered.zero_stage}")
        held = action.stage in self.gathered
        self.need(held == (action.op is Op.RESHARD), f"{action}, but the stage is {'' if held else 'not '}gathered")
        self.gathered ^= {action.stage}
        self.peak_gathered = max(self.peak_gathered, len(self.gathered))

    def reduce(self, action: Action) -> None:
        """A reduction covers exactly what it promises: its microbatch, or all of them."""
        schedule, stage = self.lowered.schedule, action.stage
        waiting = self.unreduced.get(stage, set())
        each = self.lowered.reduce_each
        self.need((action.mb is not None) == (each == "microbatch"), f"{action} with zero.reduce_each={each}")
        if action.mb is not None:
            self.need(waiting == {action.mb}, f"{action}, but the unreduced microbatches are {sorted(waiting)}")
        else:
            done, expected = self.backwards[stage], schedule.num_microbatches
            self.need(done == expected, f"{action} after {done} of {expected} backwards")
        self.unreduced[stage] = set()

    def end(self) -> None:
        """All forwards and backwards were there, all is reduced and freed."""
        schedule = self.lowered.schedule
        for stage in schedule.stages_of(self.rank):
            for mb in range(schedule.num_microbatches):
                self.need(Action(Op.F, stage, mb) in self.seen, f"{stage}F{mb} is missing")
            self.need(not self.unreduced.get(stage), f"stage {stage}: gradients are never reduced")
            done, expected = self.backwards[stage], 0 if schedule.forward_only else schedule.num_microbatches
            self.need(done == expected, f"stage {stage}: {done} of {expected} backwards")
        self.need(not self.gathered, f"stages {sorted(self.gathered)} are never freed")


def _pairs(lowered: Lowered) -> dict[tuple[int, int], dict[int, list[tuple[int, Action]]]]:
    """Per pair of ranks (lower, higher) and rank: its (position, message) list."""
    schedule = lowered.schedule
    pairs: dict[tuple[int, int], dict[int, list[tuple[int, Action]]]] = {}
    for rank, row in enumerate(lowered.actions):
        for position, action in enumerate(row):
            if action.op in MESSAGES:
                other = schedule.stage_rank[partner(action).stage]
                pair = (min(rank, other), max(rank, other))
                pairs.setdefault(pair, {pair[0]: [], pair[1]: []})[rank].append((position, action))
    return pairs


def _check_queues(lowered: Lowered) -> None:
    """Both ranks of a pair list the same messages in the same order."""
    for (one, two), queues in _pairs(lowered).items():
        ends = len(lowered.actions[one]), len(lowered.actions[two])
        for index in range(max(len(queues[one]), len(queues[two]))):
            here, mine = queues[one][index] if index < len(queues[one]) else (ends[0], None)
            there, theirs = queues[two][index] if index < len(queues[two]) else (ends[1], None)
            if mine is None or theirs is None or partner(mine) != theirs:
                raise ScheduleError(
                    f"{lowered.schedule.name}: message {index} between ranks {one} and {two} is {mine or 'missing'} on "
                    f"rank {one} but {theirs or 'missing'} on rank {two}\n{_excerpt(lowered, {one: here, two: there})}"
                )


def _check_end(lowered: Lowered, blocking: bool) -> None:
    """Play the lists; raise if they stop before their end. Lists and queues were checked before."""
    schedule = lowered.schedule
    lines: dict[tuple[int, int], deque[Action]] = {}
    for row in lowered.actions:
        for action in row:
            if action.op in MESSAGES:
                lines.setdefault(_line(lowered, action, blocking), deque()).append(action)
    at = [0] * schedule.pp
    posted: set[Action] = set()
    arrived: set[Action] = set()

    def pass_messages(first: Action) -> None:
        waiting = [first]
        while waiting:
            one = waiting.pop()
            ends = (one, partner(one))
            queues = [lines[_line(lowered, end, blocking)] for end in ends]
            if all(end in posted and queue[0] == end for end, queue in zip(ends, queues, strict=True)):
                arrived.update(queue.popleft() for queue in queues)
                waiting += [queue[0] for queue in queues if queue]

    def may_go_on(action: Action) -> bool:
        if action.op in MESSAGES:
            if action not in posted:
                posted.add(action)
                pass_messages(action)
            return action in arrived or action.op not in SENDS or not blocking
        awaits = _awaited(action)
        return awaits is None or awaits not in posted or awaits in arrived

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(lowered.actions):
            while at[rank] < len(row) and may_go_on(row[at[rank]]):
                at[rank] += 1
                moved = True
    stuck = {rank: position for rank, position in enumerate(at) if position < len(lowered.actions[rank])}
    if stuck:
        waits = ", ".join(f"rank {rank} at {lowered.actions[rank][position]}" for rank, position in stuck.items())
        raise ScheduleError(f"{schedule.name}: deadlock: {waits}\n{_excerpt(lowered, stuck)}")


def _line(lowered: Lowered, action: Action, blocking: bool) -> tuple[int, int]:
    """The queue that a message stands in on its rank: one for all messages, or one per other rank."""
    stage_rank = lowered.schedule.stage_rank
    return stage_rank[action.stage], -1 if blocking else stage_rank[partner(action).stage]


def _awaited(action: Action) -> Action | None:
    """The receive that a computation waits for, if it was posted."""
    if action.op is Op.F:
        return Action(Op.RECV_F, action.stage, action.mb)
    if action.op in (Op.B, Op.I):
        return Action(Op.RECV_B, action.stage, action.mb)
    return None


def _names(actions: set[Action] | None) -> str:
    """Alternatives as text."""
    return " or ".join(sorted(map(str, actions or ())))


def _excerpt(lowered: Lowered, marks: dict[int, int], around: int = 5) -> str:
    """The lists of all marked ranks near the marked positions."""
    lines = []
    for rank, position in sorted(marks.items()):
        row = lowered.actions[rank]
        cells = [str(action) for action in row[max(0, position - around) : position + 1]]
        if position >= len(row):
            cells.append("(end)")
        head = "... " if position > around else ""
        tail = [str(action) for action in row[position + 1 : position + 1 + around]]
        more = " ..." if position + 1 + around < len(row) else ""
        lines.append(f"  rank {rank}: {head}{' '.join(cells)}  <-- here")
        if tail:
            lines.append(f"          then {' '.join(tail)}{more}")
    return "\n".join(lines)
