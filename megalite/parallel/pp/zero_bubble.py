"""Zero-bubble schedules with one stage per rank: a backward is split, and weight gradients wait until ranks are idle.

Only the input gradient I lets other ranks go on. Each rank leaves `lag` weight gradients W behind, and does them at
the end of the step, where 1F1B idles. Ranks that run fewer forwards ahead leave more W behind, so that all hold the
same number of microbatches.
Source: Qi et al., arXiv:2401.10241, section 2.
"""

from megalite.parallel.pp.actions import Action, Op
from megalite.parallel.pp.schedule import Schedule, loop_placement

Costs = tuple[float, float, float, float]
"""Lengths of a stage's forward, input gradient and weight gradient, and of a message; in any unit."""
EQUAL: Costs = (1, 1, 1, 0)


def zb_h1(pp: int, virtual: int, num_microbatches: int) -> Schedule:
    """ZB-H1 (ZB1P): the memory of 1F1B on its first rank, pp microbatches, and a third of its bubble.

    From pp microbatches on, with F, I and W of the same length, the step is (pp - 1) (F + I - W) longer than the work.
    """
    rows = tuple(_row(rank, pp - 1 - rank, rank, num_microbatches) for rank in range(pp))
    return Schedule("zb_h1", pp, pp, num_microbatches, loop_placement(pp, 1), rows)


def zb_h2(pp: int, virtual: int, num_microbatches: int, costs: Costs = EQUAL) -> Schedule:
    """ZB-H2 (ZB2P) for these costs. With equal ones it holds 2 pp - 1 microbatches, and from so many on no rank idles
    between its first and its last action: rank r starts and ends r forwards late.

    While a microbatch goes from rank r to the last one and back, rank r has time for that many more forwards; and as
    long as the last input gradients need from rank r to rank 0, it must have weight gradients left to do.
    """
    forward, input_grad, weight_grad, send = costs
    hop = forward + input_grad + 2 * send
    rows = []
    for rank in range(pp):
        ahead, lag = int((pp - 1 - rank) * hop // forward), int(rank * hop // weight_grad)
        rows.append(_row(rank, ahead, lag, num_microbatches))
    return Schedule("zb_h2", pp, pp, num_microbatches, loop_placement(pp, 1), tuple(rows))


def _row(rank: int, ahead: int, lag: int, num_microbatches: int) -> tuple[Action, ...]:
    """`ahead` forwards, then F, I and the W of `lag` microbatches before in turn, then what is left."""
    forwards, inputs, weights = ([Action(op, rank, mb) for mb in range(num_microbatches)] for op in (Op.F, Op.I, Op.W))
    row = forwards[:ahead]
    for mb in range(num_microbatches):
        row += [*forwards[ahead + mb : ahead + mb + 1], inputs[mb]]
        if mb >= lag:
            row.append(weights[mb - lag])
    return (*row, *weights[max(0, num_microbatches - lag) :])
