"""A schedule from a CSV file: one line per pp rank, its compute actions in order (`0F0,0F1,1F0,...`), nothing else.

Which rank holds which stage, and the number of microbatches, follow from the lines. The file is checked here as far as
one line shows, and for an end of the whole; every error names the file and the line. `check.py` proves the rest.
"""

from pathlib import Path

from megalite.parallel.pp.actions import COMPUTE, Action, Op, Rows, output_key, parse_rows, producer
from megalite.parallel.pp.schedule import Schedule


def read_schedule(path: str, *, pp: int, virtual: int, num_microbatches: int | None = None) -> Schedule:
    """Read the schedule in `path`; its sizes must be those given (no microbatches given: any number).

    Raises:
        ValueError: the file and line, and what is wrong there; or the file can't be read.
    """
    try:
        text = Path(path).read_text(encoding="ascii")
    except OSError as error:
        raise ValueError(f"pipeline.schedule={path} can't be read: {error.strerror}; give the path of a file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file of pipeline actions: {error}") from None
    rows = parse_rows(text.rstrip("\n"), source=path)
    if len(rows) != pp:
        raise ValueError(f"{path} has {len(rows)} lines, one per pp rank, but mesh.pp={pp}; use mesh.pp={len(rows)}")
    placement = _placement(rows, path, virtual)
    found = 1 + max(action.mb for row in rows for action in row)
    if num_microbatches not in (None, found):
        raise ValueError(
            f"{path} moves {found} microbatches, but batch.num_microbatches={num_microbatches}; use "
            f"batch.num_microbatches={found} or another file"
        )
    for rank, row in enumerate(rows):
        _check_row(row, found, f"{path}, line {rank + 1}")
    _check_end(rows, len(placement), path)
    return Schedule(path, pp, len(placement), found, placement, rows)


def _placement(rows: Rows, path: str, virtual: int) -> tuple[int, ...]:
    """The rank of each stage."""
    owner: dict[int, int] = {}
    for rank, row in enumerate(rows):
        where = f"{path}, line {rank + 1}"
        for action in row:
            if action.op not in COMPUTE:
                raise ValueError(f"{where}: {action} is not F, B, I or W; messages and gathers are added by megalite")
            if owner.setdefault(action.stage, rank) != rank:
                raise ValueError(f"{where}: {action}, but stage {action.stage} is on line {owner[action.stage] + 1}")
        stages = sorted({action.stage for action in row})
        if len(stages) != virtual:
            listed = ", ".join(map(str, stages)) or "none"
            raise ValueError(
                f"{where}: {len(stages)} stages ({listed}), but pipeline.virtual={virtual}; every line needs as many"
            )
    for stage in range(len(owner)):
        if stage not in owner:
            raise ValueError(f"{path}: stage {stage} is on no line, but stage {max(owner)} is; count stages from 0")
    return tuple(owner[stage] for stage in range(len(owner)))


def _check_row(row: tuple[Action, ...], num_microbatches: int, where: str) -> None:
    """Each stage and microbatch: one F, then one B, or one I and later one W."""
    orders: dict[tuple[int, int], str] = {}
    for action in row:
        key = (action.stage, action.mb)
        orders[key] = orders.get(key, "") + action.op
        if not any(whole.startswith(orders[key]) for whole in ("FB", "FIW")):
            before = ", ".join(f"{action.stage}{op}{action.mb}" for op in orders[key][:-1]) or "nothing of it"
            raise ValueError(f"{where}: {action} after {before}; a microbatch takes F then B, or F, I, W, once each")
    for stage in sorted({action.stage for action in row}):
        for mb in range(num_microbatches):
            done = orders.get((stage, mb), "")
            if done not in ("FB", "FIW"):
                missing = f"{stage}F{mb}" if not done else f"{stage}W{mb}" if done == "FI" else f"{stage}B{mb}"
                raise ValueError(f"{where}: {missing} is missing; the file has {num_microbatches} microbatches")


def _check_end(rows: Rows, num_stages: int, path: str) -> None:
    """Play the lines; raise where they stop."""
    at = [0] * len(rows)
    done: set[Action | None] = {None}
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and producer(row[at[rank]], num_stages) in done:
                done.add(output_key(row[at[rank]]))
                at[rank] += 1
                moved = True
    for rank, row in enumerate(rows):
        if at[rank] < len(row):
            needs = producer(row[at[rank]], num_stages)
            alternative = f" or {needs.stage}{Op.I}{needs.mb}" if needs.op is Op.B else ""
            raise ValueError(f"{path}, line {rank + 1}: {row[at[rank]]} waits forever for {needs}{alternative}")
