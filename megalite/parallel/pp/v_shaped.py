"""Schedules with two stages per rank in a V: rank r holds stage r (chunk 0) and stage 2 pp - 1 - r (chunk 1).

The last stage shares rank 0 with the first, so its backward starts there without a message, and every rank holds one
chunk that waits long for its backward and one that waits shortly: memory is the same on all ranks.
[Note: phases] `zbv` and `dualpipe_v` are written per rank as phases, (times, words): each round does the words in
order. `F0` is the next forward of chunk 0, `I1` the next input gradient of chunk 1, `B1` its whole backward, `W` the
oldest weight gradient left behind. What is not there to do any more, with few microbatches, is passed over.
Sources: Qi et al., arXiv:2405.15362; DualPipeV: DeepSeek-V3, arXiv:2412.19437, section 3.2, cut in half.
"""

from collections import Counter, deque
from itertools import islice

from megalite.parallel.pp.actions import Action, Op, Rows, output_key, producer
from megalite.parallel.pp.schedule import Schedule, v_placement

Phases = list[tuple[int, str]]


def zbv(pp: int, virtual: int, num_microbatches: int) -> Schedule:
    """ZB-V: no rank idles between its first and its last action, in the memory of 1F1B (2 pp chunks on each rank).

    That holds from 2 pp - 1 microbatches on, for F, I and W of the same length. Rank r starts and ends r forwards late.
    """
    rows = []
    for rank in range(pp):
        phases = [
            (2 * (pp - rank) - 1, "F0"),
            (rank, "F1 F0"),
            (pp - rank, "F1 I1 W"),
            (max(0, num_microbatches - pp), "F0 I0 W F1 I1 W"),
            (rank, "I0 I1"),
            (pp - rank, "I0 W"),
        ]
        rows.append(_do(phases, rank, pp, num_microbatches))
    return Schedule("zbv", pp, 2 * pp, num_microbatches, v_placement(pp), tuple(rows))


def dualpipe_v(pp: int, virtual: int, num_microbatches: int) -> Schedule:
    """DualPipeV: in its middle every forward of one chunk stands beside a backward of the other.

    A machine that runs such a pair together hides the communication of one under the other; here they run one after
    the other. From 2 pp microbatches on a rank holds at most 2 pp + 1 chunks.
    """
    rows = []
    for rank in range(pp):
        behind, whole = pp - 1 - rank, (rank + 1) // 2
        phases = [
            (2 * behind, "F0"),
            (rank + 1, "F0 F1"),
            (behind, "I1 W F1"),
            (num_microbatches - 2 * pp + rank + 1, "F0 B1 F1 B0"),
            (behind, "B1 F1 B0"),
            (whole, "B1 B0"),
            (1, "I1 I0" if rank % 2 else "B1 I0"),
            (rank - whole, "I1 I0"),
            (behind, "W I0"),
        ]
        rows.append(_do(phases, rank, pp, num_microbatches))
    return Schedule("dualpipe_v", pp, 2 * pp, num_microbatches, v_placement(pp), tuple(rows))


def _do(phases: Phases, rank: int, pp: int, num_microbatches: int) -> tuple[Action, ...]:
    """The actions of one rank's phases, then the weight gradients that are left."""
    stages = (rank, 2 * pp - 1 - rank)
    done: Counter[tuple[str, int]] = Counter()
    weights: deque[Action] = deque()
    row: list[Action] = []
    for word in (word for times, words in phases for word in words.split() * times):
        if word == "W":
            row += [weights.popleft()] if weights else []
            continue
        op, chunk = Op(word[0]), int(word[1])
        kind = ("F" if op is Op.F else "backward", chunk)
        mb = done[kind]
        if mb < (num_microbatches if op is Op.F else done["F", chunk]):
            row.append(Action(op, stages[chunk], mb))
            done[kind] += 1
            if op is Op.I:
                weights.append(Action(Op.W, stages[chunk], mb))
    return (*row, *weights)


def v_half(pp: int, virtual: int, num_microbatches: int) -> Schedule:
    """V-Half: half the memory of 1F1B, pp + 1 (pp + 2 for even pp) of its 2 pp chunks, and little more than half its
    bubble.

    One microbatch's way through all ranks is laid out once (`_building_block`) and repeated every 6 units of time, the
    work of a rank on one microbatch; then all starts as early as it can, and idle time is filled with waiting Ws.
    With equal costs the idle time is (7 pp - 9) // 2 units of a chunk's forward for pp > 2, where 1F1B has 6 (pp - 1).
    """
    rows = []
    for rank in range(pp):
        block = _building_block(rank, pp)
        starts = [
            (start + 6 * mb, Action(op, stage, mb)) for start, op, stage in block for mb in range(num_microbatches)
        ]
        rows.append(tuple(action for _, action in sorted(starts, key=lambda entry: entry[0])))
    filled = _fill_with_weights(tuple(rows), 2 * pp)
    return Schedule("v_half", pp, 2 * pp, num_microbatches, v_placement(pp), filled)


def _building_block(rank: int, pp: int) -> list[tuple[int, Op, int]]:
    """(start, op, stage) of a rank's six actions for microbatch 0; all six starts differ modulo 6.

    From rank to rank F0 and I1 go on after 2 units, F1 and I0 after 1. The stalls at the three turns keep the starts
    apart modulo 6 on every rank; which do depends on whether pp is even.
    """
    last, first, last_stage = pp - 1, rank, 2 * pp - 1 - rank
    turn_down, turn_back, turn_up = (2, 1, 1) if pp % 2 else (4, 1, 5)
    forward1 = 2 * last + turn_down + (last - rank)
    input1 = 3 * last + turn_down + turn_back + 2 * rank
    input0 = 5 * last + turn_down + turn_back + turn_up + (last - rank)
    block = [(2 * rank, Op.F, first), (forward1, Op.F, last_stage), (input1, Op.I, last_stage), (input0, Op.I, first)]
    taken = {start % 6 for start, _, _ in block}
    assert len(taken) == 4, (rank, pp)
    for ready, stage in ((input1, last_stage), (input0, first)):
        start = next(time for time in range(ready + 1, ready + 7) if time % 6 not in taken)
        taken.add(start % 6)
        block.append((start, Op.W, stage))
    return block


def _fill_with_weights(rows: Rows, num_stages: int) -> Rows:
    """The rows played in units of time; a rank whose next action has to wait does its oldest W meanwhile."""
    left = [list(row) for row in rows]
    played: list[list[Action]] = [[] for _ in rows]
    done: set[Action] = set()
    while any(left):
        now = []
        for rank, row in enumerate(left):
            needs = producer(row[0], num_stages) if row else None
            ready = row[:1] if needs is None or needs in done else []
            waiting = (w for w in row if w.op is Op.W and Action(Op.B, w.stage, w.mb) in done)
            now += [(rank, action) for action in ready or list(islice(waiting, 1))]
        assert now, "a building block that waits for itself"
        for rank, action in now:
            left[rank].remove(action)
            played[rank].append(action)
            done.add(output_key(action) or action)
    return tuple(map(tuple, played))
