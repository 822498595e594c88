"""What a pipeline schedule is: which rank holds which stage, and what every rank computes in which order.

Invariant: rank r's actions name only stages of rank r. Two placements exist by name, others come from files: a loop
(stage s on rank s % pp) and a V (down the ranks and back up, so that the first and the last stage share rank 0:
arXiv:2405.15362, section 3).
"""

from dataclasses import dataclass

from megalite.parallel.pp.actions import Rows


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


def loop_placement(pp: int, virtual: int) -> tuple[int, ...]:
    """Stage s on rank s % pp: the pipeline passes all ranks `virtual` times."""
    return tuple(stage % pp for stage in range(pp * virtual))


def v_placement(pp: int) -> tuple[int, ...]:
    """Two stages per rank: down the ranks and back up."""
    return (*range(pp), *reversed(range(pp)))


def counted(count: int, noun: str) -> str:
    """`1 microbatch`, `2 microbatches`."""
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{ending}"
