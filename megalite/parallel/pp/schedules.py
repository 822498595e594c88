"""Pipeline schedules as pure functions: sizes in, one list of compute actions per pp rank out.

Invariant: every list respects the data flow (a forward after the forward before it, a backward after the backward
behind it); `check.py` proves it. A new schedule is one more function, one line in `BUILDERS` and one in the table of
sizes in `config/pipeline.py`. Zero-bubble schedules are in `zero_bubble.py` and `v_shaped.py`.
Sources: GPipe arXiv:1811.06965; 1F1B arXiv:1806.03377; interleaved 1F1B arXiv:2104.04473, section 2.2.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain

from megalite.config.pipeline import is_schedule_file, schedule_problems
from megalite.parallel.pp.actions import Action, Op
from megalite.parallel.pp.csv_file import read_schedule
from megalite.parallel.pp.schedule import Schedule, loop_placement
from megalite.parallel.pp.v_shaped import dualpipe_v, v_half, zbv
from megalite.parallel.pp.zero_bubble import EQUAL, Costs, zb_h1, zb_h2

Unit = list[Action]
"""What a rank does in one go between switching from forwards to backwards."""


def _passes(rank: int, pp: int, virtual: int, num_microbatches: int) -> tuple[list[Unit], list[Unit]]:
    """Forwards and backwards of one rank, a unit per microbatch: its way through all chunks of the rank."""
    stages = range(rank, pp * virtual, pp)
    forwards = [[Action(Op.F, stage, mb) for stage in stages] for mb in range(num_microbatches)]
    backwards = [[Action(Op.B, stage, mb) for stage in reversed(stages)] for mb in range(num_microbatches)]
    return forwards, backwards


def _one_forward_one_backward(forwards: list[Unit], backwards: list[Unit], warmup: int) -> tuple[Action, ...]:
    """`warmup` forwards, then forward and backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    steady = [unit for pair in zip(forwards[warmup:], backwards, strict=False) for unit in pair]
    return tuple(chain(*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :]))


def gpipe(pp: int, virtual: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards: the simplest, and every microbatch's activations are alive at once."""
    rows = []
    for rank in range(pp):
        forwards, backwards = _passes(rank, pp, virtual, num_microbatches)
        rows.append(tuple(chain(*forwards, *backwards)))
    placement = loop_placement(pp, virtual)
    return Schedule("gpipe", pp, pp * virtual, num_microbatches, placement, tuple(rows))


def one_f_one_b(pp: int, virtual: int, num_microbatches: int) -> Schedule:
    """GPipe's bubble with at most pp - rank microbatches alive on a rank.

    Several chunks per rank are for pp = 1, where a microbatch passes all of them and comes straight back.
    """
    rows = []
    for rank in range(pp):
        forwards, backwards = _passes(rank, pp, virtual, num_microbatches)
        rows.append(_one_forward_one_backward(forwards, backwards, pp - 1 - rank))
    placement = loop_placement(pp, virtual)
    return Schedule("1f1b", pp, pp * virtual, num_microbatches, placement, tuple(rows))


def interleaved(pp: int, virtual: int, num_microbatches: int) -> Schedule:
    """1F1B over `virtual` chunks per rank: the bubble shrinks by `virtual`, the messages grow by it.

    Microbatches go in groups of pp: a rank takes a group through one chunk, then the same group through its next chunk.
    With one chunk, or one rank, there is nothing to interleave and the order is that of 1F1B.
    """
    if pp == 1 or virtual == 1:
        return replace(one_f_one_b(pp, virtual, num_microbatches), name="interleaved")
    order = _interleaved_order(pp, virtual, num_microbatches)
    rows = []
    for rank in range(pp):
        forwards = [[Action(Op.F, chunk * pp + rank, mb)] for chunk, mb in order]
        backwards = [[Action(Op.B, (virtual - 1 - chunk) * pp + rank, mb)] for chunk, mb in order]
        rows.append(_one_forward_one_backward(forwards, backwards, 2 * (pp - 1 - rank) + (virtual - 1) * pp))
    placement = loop_placement(pp, virtual)
    return Schedule("interleaved", pp, pp * virtual, num_microbatches, placement, tuple(rows))


def _interleaved_order(pp: int, virtual: int, num_microbatches: int) -> list[tuple[int, int]]:
    """(chunk, mb) of each forward; a last group of fewer than pp microbatches is possible (evaluation)."""
    return [
        (chunk, mb)
        for start in range(0, num_microbatches, pp)
        for chunk in range(virtual)
        for mb in range(start, min(start + pp, num_microbatches))
    ]


BUILDERS: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zbv": zbv,
    "v_half": v_half,
    "dualpipe_v": dualpipe_v,
}


def build_schedule(kind: str, *, pp: int, virtual: int, num_microbatches: int, costs: Costs | None = None) -> Schedule:
    """The training schedule `kind` for these sizes; a kind that ends in .csv is the path of a file.

    Args:
        costs: what zb_h2 is made for, default all equal and free messages; the others are the same for all.

    Raises:
        ValueError: the kind is unknown, or can't take these sizes; the message has the numbers and the ways out.
    """
    _refuse_empty_sizes(pp, virtual, num_microbatches)
    _refuse_bad_kind(kind, pp, virtual, num_microbatches)
    if is_schedule_file(kind):
        return read_schedule(kind, pp=pp, virtual=virtual, num_microbatches=num_microbatches)
    if kind == "zb_h2":
        return zb_h2(pp, virtual, num_microbatches, costs or EQUAL)
    return BUILDERS[kind](pp, virtual, num_microbatches)


def forward_only(kind: str, *, pp: int, virtual: int, num_microbatches: int) -> Schedule:
    """Forwards only, on the stage placement of the training schedule `kind`; takes any number of microbatches.

    Microbatches go in groups that fill the pipeline once; a rank takes a group through one of its stages after the
    other. All ranks follow one order (group, stage, microbatch), so no placement can make them wait in a circle.
    """
    _refuse_empty_sizes(pp, virtual, num_microbatches)
    _refuse_bad_kind(kind, pp, virtual, None)
    if is_schedule_file(kind):
        placement = read_schedule(kind, pp=pp, virtual=virtual).stage_rank
    else:
        placement = BUILDERS[kind](pp, virtual, pp).stage_rank
    rows: list[list[Action]] = [[] for _ in range(pp)]
    group = pp if placement == loop_placement(pp, virtual) else len(placement)
    for start in range(0, num_microbatches, group):
        for stage, rank in enumerate(placement):
            rows[rank] += [Action(Op.F, stage, mb) for mb in range(start, min(start + group, num_microbatches))]
    actions = tuple(map(tuple, rows))
    return Schedule(f"{kind} forward", pp, pp * virtual, num_microbatches, placement, actions, forward_only=True)


def _refuse_empty_sizes(pp: int, virtual: int, num_microbatches: int) -> None:
    """Raise for a size below 1."""
    sizes = {"mesh.pp": pp, "pipeline.virtual": virtual, "num_microbatches": num_microbatches}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1")


def _refuse_bad_kind(kind: str, pp: int, virtual: int, num_microbatches: int | None) -> None:
    """Raise for an unknown kind, or one that can't take these sizes."""
    if pp == 1 and kind in ("gpipe", "1f1b"):
        return  # several chunks on the only rank are one after the other
    for problem in schedule_problems(kind, pp=pp, virtual=virtual, num_microbatches=num_microbatches):
        raise ValueError(problem)
