"""How long a schedule takes on ideal hardware: every action starts as soon as its rank and its inputs allow.

Exact for exact inputs: with integers or Fractions every time is one too. Messages take `send_s` and overlap with
computation. A lowered schedule is played with its messages: each starts when both ends are posted and the earlier
messages between the same two ranks are through. Gathers and reductions take no time here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from megalite.parallel.pp.actions import COMPUTE, MESSAGES, Action, Op, output_key, partner, producer
from megalite.parallel.pp.lower import Lowered
from megalite.parallel.pp.schedule import Schedule

Seconds = float | int | Fraction
Cost = Seconds | Sequence[Seconds]
"""One length for all stages, or one per stage."""


@dataclass(frozen=True, slots=True)
class Span:
    """One computation of one rank."""

    start_s: Seconds
    end_s: Seconds
    action: Action


@dataclass(frozen=True)
class Timeline:
    """When each rank computes what; all times from the start of the step."""

    spans: tuple[tuple[Span, ...], ...]
    makespan_s: Seconds

    def busy_s(self, rank: int) -> Seconds:
        """Time in which a rank computes."""
        return sum(span.end_s - span.start_s for span in self.spans[rank])

    def bubble(self, rank: int) -> Seconds:
        """Fraction of the step in which a rank idles."""
        return 1 - self.busy_s(rank) / self.makespan_s if self.makespan_s else 0

    @property
    def longest_rank_s(self) -> Seconds:
        """The longest time from a rank's first start to its own last end.

        The zero-bubble papers count idle time against it: where every rank goes on with its next step as soon as it is
        through with this one, ranks that start late end late, and their shift costs nothing.
        """
        return max((row[-1].end_s - row[0].start_s for row in self.spans if row), default=0)

    @property
    def total_bubble(self) -> Seconds:
        """Fraction of all ranks' time that is idle."""
        return sum(self.bubble(rank) for rank in range(len(self.spans))) / len(self.spans)

    @property
    def overhead(self) -> Seconds:
        """Idle time over computing time of all ranks: (pp-1)/m for equal stages under GPipe and 1F1B."""
        busy = sum(self.busy_s(rank) for rank in range(len(self.spans)))
        return (self.makespan_s * len(self.spans) - busy) / busy if busy else 0


def simulate(
    schedule: Schedule | Lowered,
    *,
    forward_s: Cost = 1.0,
    backward_s: Cost = 2.0,
    input_s: Cost = 1.0,
    weight_s: Cost = 1.0,
    send_s: Seconds = 0.0,
) -> Timeline:
    """Play `schedule` and return when each computation runs.

    Args:
        forward_s:  length of an F; a sequence has one length per stage. Likewise the next three.
        backward_s: length of a B.
        input_s:    length of an I.
        weight_s:   length of a W.
        send_s:     time between the end of a computation and the arrival of its output on another rank.

    Raises:
        ValueError: the schedule stops before its end.
    """
    costs = {Op.F: forward_s, Op.B: backward_s, Op.I: input_s, Op.W: weight_s}
    player = _Player(schedule, costs, send_s)
    while player.advance():
        pass
    player.raise_if_stuck()
    spans = tuple(map(tuple, player.spans))
    return Timeline(spans, max((row[-1].end_s for row in spans if row), default=0))


class _Player:
    """The state of a simulation: how far each rank is, and when outputs and messages are there.

    Times follow from data flow alone, so the order in which ranks are visited does not matter.
    """

    def __init__(self, schedule: Schedule | Lowered, costs: dict[Op, Cost], send_s: Seconds) -> None:
        self.lowered = isinstance(schedule, Lowered)
        self.schedule = schedule.schedule if isinstance(schedule, Lowered) else schedule
        self.rows = schedule.actions
        self.costs = costs
        self.send_s = send_s
        self.at = [0] * self.schedule.pp
        self.clock: list[Seconds] = [0] * self.schedule.pp
        self.spans: list[list[Span]] = [[] for _ in self.rows]
        self.ready: dict[Action, Seconds] = {}
        self.posted: dict[Action, Seconds] = {}
        self.queues = self._queues()

    def _queues(self) -> dict[Action, Action | None]:
        """Each message's predecessor in the queue between its two ranks."""
        last: dict[tuple[int, int], Action] = {}
        before: dict[Action, Action | None] = {}
        for rank, row in enumerate(self.rows):
            for action in (action for action in row if action.op in MESSAGES):
                other = self.schedule.stage_rank[partner(action).stage]
                before[action] = last.get((rank, other))
                last[rank, other] = action
        return before

    def advance(self) -> bool:
        """Let every rank go as far as it can; False when none moved."""
        moved = False
        for rank, row in enumerate(self.rows):
            while self.at[rank] < len(row) and self._do(rank, row[self.at[rank]]):
                self.at[rank] += 1
                moved = True
        return moved

    def _do(self, rank: int, action: Action) -> bool:
        """Do one action if its inputs are known."""
        if action.op in MESSAGES:
            self.posted[action] = self.clock[rank]
            return True
        if action.op not in COMPUTE:
            return True
        input_s = self._input_s(rank, action)
        if input_s is None:
            return False
        start = max(self.clock[rank], input_s)
        cost = self.costs[action.op]
        end = start + (cost[action.stage] if isinstance(cost, Sequence) else cost)
        self.spans[rank].append(Span(start, end, action))
        self.clock[rank] = end
        if (key := output_key(action)) is not None:
            self.ready[key] = end
        return True

    def _input_s(self, rank: int, action: Action) -> Seconds | None:
        """When the input is on this rank; None while that is not known."""
        needs = producer(action, self.schedule.num_stages)
        if needs is None:
            return 0
        if self.schedule.stage_rank[needs.stage] == rank:
            return self.ready.get(needs)
        if self.lowered:
            return self._arrival_s(Action(Op.RECV_F if action.op is Op.F else Op.RECV_B, action.stage, action.mb))
        return self.ready[needs] + self.send_s if needs in self.ready else None

    def _arrival_s(self, receive: Action) -> Seconds | None:
        """When a message is through: both ends posted, the earlier ones of the pair through, plus send_s."""
        if receive not in self.queues:
            return None
        chain: list[Action] = []
        message: Action | None = receive
        while message is not None and message not in self.ready:
            chain.append(message)
            message = self.queues[message]
        free_s = self.ready[message] if message is not None else 0
        for action in reversed(chain):
            if action not in self.posted or partner(action) not in self.posted:
                return None
            free_s = max(free_s, self.posted[action], self.posted[partner(action)]) + self.send_s
            self.ready[action] = free_s
        return free_s

    def raise_if_stuck(self) -> None:
        """Raise if a rank did not reach its end."""
        for rank, row in enumerate(self.rows):
            if self.at[rank] < len(row):
                stuck = row[self.at[rank]]
                raise ValueError(f"schedule {self.schedule.name}: rank {rank} never gets the input of {stuck}")
