"""The words a pipeline schedule is written in: one action is one thing that one rank does for one stage.

A schedule is a list of actions per pp rank and nothing else. An action prints as stage, op, microbatch: `2F0`,
`3SEND_F1`, `2GATHER`; parsing what was printed gives the same action back. SEND and RECV carry the stage that sends
resp. receives, so `0SEND_F3` pairs with `1RECV_F3` and `1SEND_B3` with `0RECV_B3`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Op(StrEnum):
    """What an action does."""

    F = "F"
    """Forward."""
    B = "B"
    """Full backward: input and weight gradients."""
    I = "I"  # noqa: E741 - the published name of this half of the backward
    """Input gradient only."""
    W = "W"
    """Weight gradient only."""
    SEND_F = "SEND_F"
    """Send the activation of this stage to stage + 1."""
    RECV_F = "RECV_F"
    """Receive the activation of stage - 1."""
    SEND_B = "SEND_B"
    """Send the gradient of this stage's input to stage - 1."""
    RECV_B = "RECV_B"
    """Receive the gradient of this stage's output from stage + 1."""
    GATHER = "GATHER"
    """Gather the stage's sharded parameters."""
    RESHARD = "RESHARD"
    """Free the gathered parameters."""
    REDUCE = "REDUCE"
    """Reduce the stage's gradients over dp; with a microbatch: only what that microbatch added."""


COMPUTE = frozenset({Op.F, Op.B, Op.I, Op.W})
SENDS = frozenset({Op.SEND_F, Op.SEND_B})
RECVS = frozenset({Op.RECV_F, Op.RECV_B})
MESSAGES = SENDS | RECVS

_PARTNERS = {
    Op.SEND_F: (Op.RECV_F, 1),
    Op.RECV_F: (Op.SEND_F, -1),
    Op.SEND_B: (Op.RECV_B, -1),
    Op.RECV_B: (Op.SEND_B, 1),
}
_WITHOUT_MICROBATCH = frozenset({Op.GATHER, Op.RESHARD})
_PATTERN = re.compile(r"(\d+)([A-Z](?:[A-Z_]*[A-Z])?)(\d*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one rank's list. `mb` is None for GATHER and RESHARD, and for a REDUCE of the whole step."""

    op: Op
    stage: int
    mb: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{'' if self.mb is None else self.mb}"


Rows = tuple[tuple[Action, ...], ...]
"""One list of actions per pp rank."""


def producer(action: Action, num_stages: int) -> Action | None:
    """The action of another stage whose output `action` consumes; a B stands for the I of a split backward too."""
    if action.op is Op.F and action.stage > 0:
        return Action(Op.F, action.stage - 1, action.mb)
    if action.op in (Op.B, Op.I) and action.stage < num_stages - 1:
        return Action(Op.B, action.stage + 1, action.mb)
    return None


def output_key(action: Action) -> Action | None:
    """The name under which consumers know the output of a computation; None for W, which has none."""
    if action.op is Op.W:
        return None
    return Action(Op.B, action.stage, action.mb) if action.op is Op.I else action


def parse_action(text: str) -> Action:
    """Read one printed action.

    Raises:
        ValueError: `text` is not stage, op, microbatch, or the op needs a microbatch or takes none.
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None or match[2] not in Op.__members__:
        raise ValueError(f"action {text!r} is not <stage><op><microbatch> with op one of {', '.join(Op)}; e.g. 2F0")
    op = Op(match[2])
    if match[3] and op in _WITHOUT_MICROBATCH:
        raise ValueError(f"action {text!r}: {op} takes no microbatch; write {match[1]}{op}")
    if not match[3] and op not in _WITHOUT_MICROBATCH and op is not Op.REDUCE:
        raise ValueError(f"action {text!r}: {op} needs a microbatch; e.g. {match[1]}{op}0")
    return Action(op, int(match[1]), int(match[3]) if match[3] else None)


def partner(action: Action) -> Action:
    """The other end of a SEND or RECV."""
    op, step = _PARTNERS[action.op]
    return Action(op, action.stage + step, action.mb)


def format_rows(rows: Iterable[Iterable[Action]]) -> str:
    """CSV text, one line per pp rank."""
    return "".join(",".join(map(str, row)) + "\n" for row in rows)


def parse_rows(text: str, *, source: str = "<text>") -> Rows:
    """Read CSV text with one line per pp rank; an error names `source` and the line."""
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            rows.append(tuple(parse_action(cell) for cell in line.split(",") if cell.strip()))
        except ValueError as error:
            raise ValueError(f"{source}, line {number}: {error}") from None
    return tuple(rows)


def write_csv(rows: Iterable[Iterable[Action]], path: str | Path) -> None:
    """Write one line per pp rank."""
    Path(path).write_text(format_rows(rows), encoding="ascii")


def read_csv(path: str | Path) -> Rows:
    """Read what `write_csv` wrote."""
    return parse_rows(Path(path).read_text(encoding="ascii"), source=str(path))
