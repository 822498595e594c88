"""Pipeline schedules as pure functions: sizes in, one list of compute actions per pp rank out.

Invariant: every list respects the data flow (a forward after the forward before it, a backward after the backward
behind it); `check.py` proves it. Stage s lives on rank s % pp. A new schedule is one more function and one line in
`BUILDERS`.
Sources: GPipe arXiv:1811.06965; 1F1B arXiv:1806.03377; interleaved 1F1B arXiv:2104.04473, section 2.2.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain

from megalite.parallel.pp.actions import Action, Op, Rows


@dataclass(frozen=True)
class Schedule:
    """What every pp rank computes, in order.

    stage_rank: the pp rank of each stage.
    actions:    per pp rank, F and B (or I and W) actions only; sends, gathers and reductions come with `lower`.
    """

    name: str
    pp: int
    num_stages: int
    num_microbatches: int
    stage_rank: tuple[int, ...]
    actions: Rows
    forward_only: bool = False

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of one pp rank, first to last."""
        return tuple(stage for stage, owner in enumerate(self.stage_rank) if owner == rank)


def _loop_placement(pp: int, virtual: int) -> tuple[int, ...]:
    """Stage s on rank s % pp: the pipeline passes all ranks `virtual` times."""
    return tuple(stage % pp for stage in range(pp * virtual))


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
    placement = _loop_placement(pp, virtual)
    return Schedule("gpipe", pp, pp * virtual, num_microbatches, placement, tuple(rows))


def one_f_one_b(pp: int, virtual: int, num_microbatches: int) -> Schedule:
    """GPipe's bubble with at most pp - rank microbatches alive on a rank.

    Several chunks per rank are for pp = 1, where a microbatch passes all of them and comes straight back.
    """
    rows = []
    for rank in range(pp):
        forwards, backwards = _passes(rank, pp, virtual, num_microbatches)
        rows.append(_one_forward_one_backward(forwards, backwards, pp - 1 - rank))
    placement = _loop_placement(pp, virtual)
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
    placement = _loop_placement(pp, virtual)
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
}


def build_schedule(kind: str, *, pp: int, virtual: int, num_microbatches: int) -> Schedule:
    """The training schedule `kind` for these sizes.

    Raises:
        ValueError: the kind is unknown, or can't take these sizes; the message has the numbers and the ways out.
    """
    _refuse_bad_sizes(kind, pp, virtual, num_microbatches)
    if pp > 1 and virtual > 1 and kind != "interleaved":
        raise ValueError(
            f"pipeline.schedule={kind} takes one chunk per rank, but pipeline.virtual={virtual} at mesh.pp={pp}; "
            f"use pipeline.virtual=1 or pipeline.schedule=interleaved"
        )
    if kind == "interleaved" and num_microbatches % pp:
        down = num_microbatches - num_microbatches % pp
        near = f"{down} or {down + pp}" if down else f"{pp}"
        raise ValueError(
            f"pipeline.schedule=interleaved moves microbatches in groups of mesh.pp={pp}, which does not divide "
            f"num_microbatches={num_microbatches}; use {near} microbatches (batch.num_microbatches, "
            f"batch.micro_batch_size or batch.global_batch_size), or pipeline.schedule=1f1b with pipeline.virtual=1"
        )
    return BUILDERS[kind](pp, virtual, num_microbatches)


def forward_only(kind: str, *, pp: int, virtual: int, num_microbatches: int) -> Schedule:
    """Forwards only, on the stage placement of the training schedule `kind`; takes any number of microbatches."""
    _refuse_bad_sizes(kind, pp, virtual, num_microbatches)
    order = _interleaved_order(pp, virtual, num_microbatches)
    rows = tuple(tuple(Action(Op.F, chunk * pp + rank, mb) for chunk, mb in order) for rank in range(pp))
    placement = BUILDERS[kind](pp, virtual, pp).stage_rank
    return Schedule(f"{kind} forward", pp, pp * virtual, num_microbatches, placement, rows, forward_only=True)


def _refuse_bad_sizes(kind: str, pp: int, virtual: int, num_microbatches: int) -> None:
    """Raise for an unknown kind or a size below 1."""
    if kind not in BUILDERS:
        raise ValueError(f"pipeline.schedule={kind} is unknown; use {', '.join(BUILDERS)}")
    sizes = {"mesh.pp": pp, "pipeline.virtual": virtual, "num_microbatches": num_microbatches}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1")
