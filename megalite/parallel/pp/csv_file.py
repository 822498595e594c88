"""A schedule from a CSV file: one line per pp rank, its compute actions in order (`0F0,0F1,1F0,...`), nothing else.

Which rank holds which stage, and the number of microbatches, follow from the lines. The file is checked here as far as
one line shows, and for an end of the whole; every error names the file, the line, the rule and a way out. `check.py`
proves the rest.
"""

from dataclasses import replace
from pathlib import Path

from megalite.parallel.pp.actions import COMPUTE, Action, Op, Rows, output_key, parse_rows, producer
from megalite.parallel.pp.schedule import Schedule, counted

EXAMPLE = "0F0,0F1,0B0,0B1"


def read_schedule(path: str, *, pp: int, virtual: int, num_microbatches: int | None = None) -> Schedule:
    """Read the schedule in `path`; its sizes must be those given (no microbatches given: any number).

    Raises:
        ValueError: the file and line, and what is wrong there; or the file can't be read.
    """
    rows = parse_rows(_text(path).rstrip("\n"), source=path)
    if not rows:
        raise ValueError(
            f"{path} is empty; a schedule file has one line per pp rank (mesh.pp={pp}) such as {EXAMPLE}: write them, "
            "or use one of the named schedules, e.g. pipeline.schedule=1f1b"
        )
    if len(rows) != pp:
        raise ValueError(
            f"{path} has {counted(len(rows), 'line')}, one per pp rank, but mesh.pp={pp}; use mesh.pp={len(rows)} or "
            "another file"
        )
    placement = _placement(rows, path, virtual)
    found = 1 + max(action.mb for row in rows for action in row)
    if num_microbatches not in (None, found):
        raise ValueError(
            f"{path} moves {counted(found, 'microbatch')}, but batch.num_microbatches={num_microbatches}; use "
            f"batch.num_microbatches={found} or another file"
        )
    for rank, row in enumerate(rows):
        _check_row(row, found, f"{path}, line {rank + 1}")
    _check_end(rows, len(placement), path)
    return Schedule(path, pp, len(placement), found, placement, rows)


def _text(path: str) -> str:
    try:
        raw = Path(path).read_bytes()
        return raw.decode("ascii")
    except OSError as error:
        raise ValueError(f"pipeline.schedule={path} can't be read: {error.strerror}; give the path of a file") from None
    except UnicodeDecodeError as error:
        line = 1 + raw.count(b"\n", 0, error.start)
        raise ValueError(
            f"{path}, line {line}: byte 0x{raw[error.start]:02x} is not ASCII, so this is not a text file of pipeline "
            f"actions; write lines such as {EXAMPLE}"
        ) from None


def _placement(rows: Rows, path: str, virtual: int) -> tuple[int, ...]:
    """The rank of each stage."""
    owner: dict[int, int] = {}
    for rank, row in enumerate(rows):
        where = f"{path}, line {rank + 1}"
        for action in row:
            if action.op not in COMPUTE:
                raise ValueError(
                    f"{where}: {action} is not F, B, I or W; messages and gathers are added by megalite: remove it"
                )
            if (line := owner.setdefault(action.stage, rank) + 1) != rank + 1:
                raise ValueError(
                    f"{where}: {action}, but stage {action.stage} is on line {line}; one rank has all actions of a "
                    f"stage: move it to line {line}, or give it a stage of its own line"
                )
        stages = sorted({action.stage for action in row})
        if len(stages) != virtual:
            listed = ", ".join(map(str, stages)) or "none"
            raise ValueError(
                f"{where}: {counted(len(stages), 'stage')} ({listed}), but pipeline.virtual={virtual}; every line has "
                f"as many stages: {_other_virtual(rows, virtual)}"
            )
    for stage in range(len(owner)):
        if stage not in owner:
            last = max(owner)
            raise ValueError(
                f"{path}, line {owner[last] + 1}: stage {last}, but stage {stage} is on no line; stages are counted "
                f"from 0 without gaps: add stage {stage}, or number the stages after it one lower"
            )
    return tuple(owner[stage] for stage in range(len(owner)))


def _other_virtual(rows: Rows, virtual: int) -> str:
    """What to do where a line has another number of stages than `virtual`."""
    found = {len({action.stage for action in row}) for row in rows}
    if len(found) == 1 and 0 not in found:
        return f"use pipeline.virtual={found.pop()}"
    return f"give each line actions of {counted(virtual, 'stage')}"


def _check_row(row: tuple[Action, ...], num_microbatches: int, where: str) -> None:
    """Each stage and microbatch: one F, then one B, or one I and later one W."""
    orders: dict[tuple[int, int], str] = {}
    for action in row:
        key = (action.stage, action.mb)
        orders[key] = orders.get(key, "") + action.op
        if not any(whole.startswith(orders[key]) for whole in ("FB", "FIW")):
            before = [str(Action(Op(op), *key)) for op in orders[key][:-1]]
            raise ValueError(
                f"{where}: {action} after {', '.join(before) or 'nothing of it'}; a microbatch takes F then B, or F, "
                f"I, W, once each: {_other_place(action, before)}"
            )
    for stage in sorted({action.stage for action in row}):
        for mb in range(num_microbatches):
            done = orders.get((stage, mb), "")
            if done not in ("FB", "FIW"):
                missing = f"{stage}F{mb}" if not done else f"{stage}W{mb}" if done == "FI" else f"{stage}B{mb}"
                raise ValueError(
                    f"{where}: {missing} is missing; the file has {counted(num_microbatches, 'microbatch')}, and each "
                    f"takes F then B, or F, I, W, in every stage: add {missing}"
                )


def _other_place(action: Action, before: list[str]) -> str:
    """What to do with an action that can't come after those before it, of the same stage and microbatch."""
    if str(action) in before:
        return f"remove one {action}"
    whole = {Op.F: "", Op.B: "F", Op.I: "F", Op.W: "FI"}[action.op]
    missing = [str(needed) for op in whole if str(needed := replace(action, op=Op(op))) not in before]
    if missing and len(before) + len(missing) == len(whole):
        return f"put {' and '.join(missing)} before it"
    if action.op is Op.W:
        return f"remove it, or write {replace(action, op=Op.I)} in place of {before[1]}"
    return f"remove it, or {' and '.join(before[1:])}"


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
    stuck = next((rank for rank, row in enumerate(rows) if at[rank] < len(row)), None)
    if stuck is not None:
        raise ValueError(_circle(rows, at, stuck, num_stages, path))


def _circle(rows: Rows, at: list[int], rank: int, num_stages: int, path: str) -> str:
    """The waits that end in themselves, of which the stop of `rank` is one or is a consequence."""
    waits: dict[int, tuple[Action, Action, int]] = {}
    while rank not in waits:
        action = rows[rank][at[rank]]
        wanted = producer(action, num_stages)
        needs, there = next((a, r) for r, row in enumerate(rows) for a in row if output_key(a) == wanted)
        waits[rank] = (action, needs, there)
        rank = there
    ranks = list(waits)[list(waits).index(rank) :]
    steps = [(*waits[rank], rows[waits[rank][2]][at[waits[rank][2]]]) for rank in ranks]
    chain = ", which waits for ".join(
        f"{needs} on line {there + 1}" + (f" behind {behind}" if behind != needs else "")
        for _, needs, there, behind in steps
    )
    ways = ", or ".join(f"{needs} in front of {behind}" for _, needs, _, behind in steps if behind != needs)
    return (
        f"{path}, line {rank + 1}: {steps[0][0]} waits forever for {chain}; a rank does its line from left to right, "
        f"an F after the F of the stage before, a B or I after the B or I of the stage behind: put {ways}"
    )
