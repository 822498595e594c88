"""Explores every interleaving of actors that run straight programs over shared flags, memory and slots of GPUs.

An actor is a block of a grid, a copy engine or a host: a list of atomic steps. Weak memory is modelled by
concurrency: what no release orders is put into two actors. Invariant: no violation is missed. `reduced` leaves out
interleavings that only differ in the order of independent steps (persistent sets: what is left out commutes with what
is taken; programs end, so nothing is put off for ever); the tests compare it with the full exploration.
Reference: Godefroid, Partial-Order Methods for the Verification of Concurrent Systems, sections 4 and 6.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

MODULUS = 8
"""Flags count modulo this, so that a few calls wrap; differences are signed, as int32 differences are."""


@dataclass(frozen=True)
class Step:
    """One atomic step of an actor.

    kind: wait (flag >= value, signed difference), plain_wait (flag >= value as unsigned numbers), equal (flag ==
    value), set (flag := value), count (one more of `total` has come; the last one sets the flag), write and read
    (memory; a read must find `value`), start and end (take and leave a slot of the GPU `name`).
    """

    kind: str
    name: Hashable
    value: int = 0
    total: int = 1


@dataclass(frozen=True)
class Outcome:
    """What an exploration found: a violation with the steps that lead to it, or none; and how much was seen."""

    states: int
    violation: str = ""
    trace: tuple[str, ...] = ()


@dataclass
class System:
    """Actors and what they share. `slots` limits how many of a GPU's blocks are resident at once."""

    slots: dict[Hashable, int] = field(default_factory=dict)
    first: dict[Hashable, int] = field(default_factory=dict)
    """Flags that do not start at 0."""
    names: list[str] = field(default_factory=list)
    programs: list[list[Step]] = field(default_factory=list)
    after: list[list[str]] = field(default_factory=list)

    def add(self, name: str, steps: Iterable[Step], *, after: Iterable[str] = (), gpu: Hashable = None) -> str:
        """A new actor that starts when the actors of `after` have ended; with a GPU it takes one of its slots."""
        after = list(after)
        program = [Step("wait", ("ended", other), 1) for other in after]
        program += [Step("start", gpu)] if gpu is not None else []
        program += list(steps)
        program += [Step("end", gpu)] if gpu is not None else []
        self.programs.append([*program, Step("set", ("ended", name), 1)])
        self.names.append(name)
        self.after.append(after)
        return name

    def explore(self, *, reduced: bool = True, limit: int = 2_000_000) -> Outcome:
        """All interleavings, or enough of them."""
        return _Search(self, reduced, limit).run()


USES = ("write", "access", "set", "watch", "start", "end")
SETS, DATA, ANY_ORDER = {"set", "count"}, {"write", "read"}, {"equal", "plain_wait"}


class _Search:
    """State: one tuple of program counters, then flags, memory, free slots and counters by index."""

    def __init__(self, system: System, reduced: bool, limit: int):
        self.system, self.reduced, self.limit = system, reduced, limit
        self.programs = system.programs
        self.actors = range(len(self.programs))
        self.index: dict[Hashable, int] = {}
        start = [0] * len(self.programs)
        for step in (step for program in self.programs for step in program):
            for key in _keys(step):
                if key not in self.index:
                    self.index[key] = len(start)
                    start.append(self._initial(key))
        self.start = tuple(start)
        self.cells = [[self.index[_keys(step)[0]] for step in program] for program in self.programs]
        """Where in the state the thing lies that a step is enabled by."""
        self.enders: dict[tuple, tuple[list[tuple[int, int]], bool]] = {}
        self._look_ahead()
        self.followers = [0] * len(self.programs)
        """Of each actor a bit mask of those that start only when it has ended, directly or not."""
        place = {name: actor for actor, name in enumerate(system.names)}
        for actor in sorted(self.actors, key=lambda a: self._depth(a, place), reverse=True):
            for other in system.after[actor]:
                self.followers[place[other]] |= self.followers[actor] | 1 << actor

    def _initial(self, key: tuple) -> int:
        what, name = key
        return {"flag": self.system.first.get(name, 0), "slot": self.system.slots.get(name, 1 << 20)}.get(what, 0)

    def _depth(self, actor: int, place: dict[str, int]) -> int:
        return 1 + max((self._depth(place[name], place) for name in self.system.after[actor]), default=0)

    def _look_ahead(self) -> None:
        """uses[use][key]: (actor, index) of every step that uses the key so, in program order."""
        self.uses: dict[str, dict[tuple, list[tuple[int, int]]]] = {use: {} for use in USES}
        for actor, program in enumerate(self.programs):
            for at, step in enumerate(program):
                for use in _uses(step):
                    self.uses[use].setdefault(_keys(step)[0], []).append((actor, at))

    def later(self, use: str, key: tuple, state: tuple, actor: int) -> list[tuple[int, int]]:
        """Steps of other actors that still have this use of `key` before them: each actor's first."""
        found: dict[int, int] = {}
        for other, at in self.uses[use].get(key, ()):
            if other != actor and state[other] <= at:
                found.setdefault(other, at)
        return list(found.items())

    def enabled(self, state: tuple, actor: int) -> bool:
        program, at = self.programs[actor], state[actor]
        if at == len(program):
            return False
        step = program[at]
        now = state[self.cells[actor][at]]
        if step.kind == "wait":
            return _signed(now - step.value) >= 0
        if step.kind == "plain_wait":
            return now >= step.value % MODULUS
        if step.kind == "equal":
            return now == step.value
        return step.kind != "start" or now > 0

    def take(self, state: tuple, actor: int) -> tuple[tuple, str]:
        """The next state, and what is wrong with the step."""
        step = self.programs[actor][state[actor]]
        at = self.cells[actor][state[actor]]
        after = list(state)
        after[actor] += 1
        wrong = ""
        if step.kind == "set":
            after[at] = step.value % MODULUS
        elif step.kind == "count":
            counter = self.index[_keys(step)[1]]
            after[counter] += 1
            if after[counter] == step.total:
                after[at] = step.value % MODULUS
        elif step.kind == "write":
            after[at] = step.value
        elif step.kind == "read" and state[at] != step.value:
            how = "read before write" if state[at] < step.value else "overwritten before the last read"
            wrong = f"{how}: {self.system.names[actor]} wants {step.value} in {step.name}, finds {state[at]}"
        elif step.kind in ("start", "end"):
            after[at] += 1 if step.kind == "end" else -1
        return tuple(after), wrong

    def chosen(self, state: tuple, enabled: list[int]) -> list[int]:
        """Enough of the enabled actors to miss no violation."""
        best = enabled
        for actor in enabled:
            group = self._closure(state, actor)
            some = [other for other in enabled if other in group]
            if len(some) == 1:
                return some
            best = some if len(some) < len(best) else best
        return best

    def _closure(self, state: tuple, actor: int) -> set[int]:
        """Actors whose next steps are taken first: until one of them moves, nobody else can do a step that does not
        commute with those. Whoever could is held up by a wait, and so are all who could end that wait, and so on: if
        that comes back to itself, nobody can be the first."""
        group = {actor}
        held = set(self._conflicts(state, actor))
        todo = list(held)
        while todo:
            other, at = todo.pop()
            if other in group:
                continue
            more = self._held_by(state, other, at, group, held)
            if more is None:
                group.add(other)
                more = self._conflicts(state, other) if self.enabled(state, other) else self._enablers(state, other)
            new = [one for one in more if one not in held]
            held.update(new)
            todo += new
        return group

    def _held_by(self, state: tuple, actor: int, at: int, group: set, held: set) -> list[tuple[int, int]] | None:
        """Steps of others without which `actor` does not come to its step `at`; None if it may be on its way."""
        best = None
        program, cells = self.programs[actor], self.cells[actor]
        for index in range(state[actor], at):
            step = program[index]
            if step.kind != "wait" or _signed(state[cells[index]] - step.value) >= 0:
                continue
            for option in self._ways_to_hold(state, step):
                if all(other in group or (other, at) in held for other, at in option):
                    return []
                best = option
        return best

    def _ways_to_hold(self, state: tuple, wait: Step) -> list[list[tuple[int, int]]]:
        """Lists of steps: the wait does not end before one of a list is taken."""
        known = self.enders.get((wait.name, wait.value))
        if known is None:
            known = self.enders[wait.name, wait.value] = self._all_enders(wait)
        steps, counted = known
        left = [(other, at) for other, at in steps if state[other] <= at]
        return [[one] for one in left] if counted else [left]

    def _all_enders(self, wait: Step) -> tuple[list[tuple[int, int]], bool]:
        """The steps that could end a wait, and whether it needs all of them."""
        found = self.uses["set"].get(("flag", wait.name), ())
        steps = [one for one in found if _signed(self.programs[one[0]][one[1]].value - wait.value) >= 0]
        kinds = {(self.programs[other][at].kind, self.programs[other][at].value) for other, at in steps}
        return steps, len(kinds) == 1 and kinds.pop()[0] == "count"

    def _conflicts(self, state: tuple, actor: int) -> list[tuple[int, int]]:
        """Later steps of others that do not commute with the actor's enabled next one."""
        step = self.programs[actor][state[actor]]
        key = _keys(step)[0]
        if step.kind in DATA:
            return self.later("write" if step.kind == "read" else "access", key, state, actor)
        if step.kind in ANY_ORDER:
            return self.later("set", key, state, actor)
        if step.kind in SETS:  # a flag that only grows commutes with waiting for it
            others = self.later("set", key, state, actor) if step.kind == "set" else []
            return others + self.later("watch", key, state, actor)
        if step.kind == "start":
            followers = self.followers[actor]
            others = [one for one in self.later("start", key, state, actor) if not followers >> one[0] & 1]
            return others if len(others) >= state[self.index[key]] else []
        return []

    def _enablers(self, state: tuple, actor: int) -> list[tuple[int, int]]:
        """Steps of others that may enable the actor's disabled next one, which is no plain wait."""
        step = self.programs[actor][state[actor]]
        key = _keys(step)[0]
        if step.kind != "start":
            return self.later("set", key, state, actor)
        ends = self.uses["end"][key]
        return [(other, at) for other, at in ends if state[other] <= at and self._started(state, other)]

    def _started(self, state: tuple, actor: int) -> bool:
        return any(step.kind == "start" for step in self.programs[actor][: state[actor]])

    def run(self) -> Outcome:
        parents: dict[tuple, tuple[tuple, int] | None] = {self.start: None}
        todo = [self.start]
        while todo:
            state = todo.pop()
            enabled = [actor for actor in self.actors if self.enabled(state, actor)]
            if not enabled and any(state[a] < len(self.programs[a]) for a in self.actors):
                return Outcome(len(parents), f"deadlock: {self._stuck(state)}", self._trace(parents, state))
            for actor in self.chosen(state, enabled) if self.reduced else enabled:
                after, wrong = self.take(state, actor)
                if wrong:
                    return Outcome(len(parents), wrong, self._trace(parents, state))
                if after not in parents:
                    parents[after] = (state, actor)
                    todo.append(after)
            assert len(parents) < self.limit, "too many states"
        return Outcome(len(parents))

    def _stuck(self, state: tuple) -> str:
        waiting = [a for a in self.actors if 0 < state[a] < len(self.programs[a])] or list(self.actors)
        steps = [
            (self.system.names[a], self.programs[a][state[a]]) for a in waiting if state[a] < len(self.programs[a])
        ]
        return "; ".join(f"{name} at {step.kind} {step.name}" for name, step in steps[:6])

    def _trace(self, parents: dict, state: tuple) -> tuple[str, ...]:
        found = []
        while parents[state] is not None:
            state, actor = parents[state]
            step = self.programs[actor][state[actor]]
            found.append(f"{self.system.names[actor]}: {step.kind} {step.name} {step.value}")
        return tuple(reversed(found))


def _keys(step: Step) -> list[tuple]:
    """What of the shared state a step touches, the one that it is enabled by first."""
    if step.kind in DATA:
        return [("data", step.name)]
    if step.kind in ("start", "end"):
        return [("slot", step.name)]
    return [("flag", step.name)] + ([("count", (step.name, step.value))] if step.kind == "count" else [])


def _uses(step: Step) -> list[str]:
    if step.kind in DATA:
        return ["access", "write"] if step.kind == "write" else ["access"]
    kinds = {"count": "set", "equal": "watch", "plain_wait": "watch"}
    use = kinds.get(step.kind, step.kind)
    return [use] if use in USES else []


def _signed(difference: int) -> int:
    return (difference + MODULUS // 2) % MODULUS - MODULUS // 2
