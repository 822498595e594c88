"""What pipeline options mean: the sizes that each schedule takes, and `pipeline.layout`, which blocks a stage has.

Grammar of a layout: stages joined by `|`; a stage is items joined by `,`; an item is `E` (embedding, the first of all),
`B` (a block), `n*B` (n blocks, 0 or more) or `H` (head, the last of all): `E,2*B|3*B|3*B|2*B,H`. `auto` balances the
stages by their FLOPs. Spaces around items are allowed. Pure.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from megalite.observe.flops import ModelShape, flops_per_token

ITEM = re.compile(r"(?:(\d+)\s*\*\s*)?([A-Za-z]+)", re.ASCII)


@dataclass(frozen=True)
class Takes:
    """Sizes that a schedule takes. virtual: chunks per rank, None: any; rounds: microbatches in multiples of pp."""

    virtual: int | None
    rounds: bool = False


SCHEDULES = {
    "gpipe": Takes(virtual=1),
    "1f1b": Takes(virtual=1),
    "interleaved": Takes(virtual=None, rounds=True),
    "zb_h1": Takes(virtual=1),
    "zb_h2": Takes(virtual=1),
    "zbv": Takes(virtual=2),
    "v_half": Takes(virtual=2),
    "dualpipe_v": Takes(virtual=2),
}


def is_schedule_file(kind: str) -> bool:
    """Whether `pipeline.schedule` names a file, not a kind."""
    return kind.endswith(".csv")


def schedule_problems(
    kind: str, *, pp: int, virtual: int, num_microbatches: int | None, sequences: int | None = None
) -> Iterator[str]:
    """One message for each size that the schedule can't take; files are checked when they are read.

    Args:
        num_microbatches: None: not known, any.
        sequences: sequences of one microbatch over all dp ranks, to name global batch sizes that work.
    """
    if is_schedule_file(kind):
        return
    if kind not in SCHEDULES:
        yield f"pipeline.schedule={kind} is unknown; use {', '.join(SCHEDULES)}, or the path of a .csv file"
        return
    takes = SCHEDULES[kind]
    if takes.virtual not in (None, virtual):
        chunks = "one chunk" if takes.virtual == 1 else f"{takes.virtual} chunks"
        other = "interleaved" if virtual > 1 else "1f1b"
        yield (
            f"pipeline.schedule={kind} takes {chunks} per rank, not pipeline.virtual={virtual} at mesh.pp={pp}; use "
            f"pipeline.virtual={takes.virtual} or pipeline.schedule={other}"
        )
    if takes.rounds and num_microbatches and num_microbatches % pp:
        below = num_microbatches // pp * pp
        near = [number for number in (below, below + pp) if number]
        totals = f" (batch.global_batch_size={_either(n * sequences for n in near)})" if sequences else ""
        yield (
            f"batch.num_microbatches={num_microbatches} is not a multiple of mesh.pp={pp}, which pipeline.schedule="
            f"{kind} needs; use {_either(near)}{totals}, or pipeline.schedule=1f1b with pipeline.virtual=1"
        )


def _either(numbers: Iterable[int]) -> str:
    return " or ".join(map(str, numbers))


def layout_sizes(layout: str, shape: ModelShape, *, seq_len: int, num_stages: int) -> tuple[int, ...]:
    """Blocks per stage of a layout string, or of `auto` for this model.

    Raises:
        ValueError: what is wrong, with its column in the string, or the sizes that don't fit.
    """
    if layout == "auto":
        return balanced_sizes(shape, seq_len=seq_len, num_stages=num_stages)
    sizes = parse_layout(layout)
    if len(sizes) != num_stages:
        raise ValueError(
            f"pipeline.layout={layout} has {len(sizes)} stages, but mesh.pp * pipeline.virtual = {num_stages}; give "
            f"{num_stages} stages or use pipeline.layout=auto"
        )
    if sum(sizes) != shape.num_layers:
        raise ValueError(
            f"pipeline.layout={layout} has {sum(sizes)} blocks, not model.num_layers={shape.num_layers}; make it "
            f"{shape.num_layers} or use pipeline.layout=auto"
        )
    return sizes


def parse_layout(layout: str) -> tuple[int, ...]:
    """Blocks per stage of a layout string.

    Raises:
        ValueError: what is wrong, and its column, counted from 1.
    """
    items = list(_items(layout))
    sizes = [0] * (1 + layout.count("|"))
    for index, (column, stage, count, kind) in enumerate(items):
        if kind == "E" and index != 0:
            raise _error(layout, column, "E (the embedding) comes first, in the first stage")
        if kind == "H" and index != len(items) - 1:
            raise _error(layout, column, "H (the head) comes last, in the last stage")
        sizes[stage] += count if kind == "B" else 0
    if items[0][3] != "E":
        raise _error(layout, items[0][0], "the first stage starts with E (the embedding)")
    if items[-1][3] != "H":
        raise _error(layout, items[-1][0], "the last stage ends with H (the head)")
    return tuple(sizes)


def _items(layout: str) -> Iterator[tuple[int, int, int, str]]:
    """(column, stage, count, kind) of each item."""
    column = 1
    for stage, text in enumerate(layout.split("|")):
        for item in text.split(","):
            at = column + len(item) - len(item.lstrip())
            match = ITEM.fullmatch(item.strip())
            if match is None or match[2] not in ("E", "B", "H"):
                found = f"'{item.strip()}'" if item.strip() else "nothing"
                raise _error(layout, at, f"{found} is not E, B, n*B or H; e.g. E,2*B|3*B|2*B,H (0*B: no block)")
            if match[1] and match[2] != "B":
                raise _error(layout, at, f"there is one {match[2]}; write {match[2]}")
            yield at, stage, int(match[1] or 1), match[2]
            column += len(item) + 1


def _error(layout: str, column: int, why: str) -> ValueError:
    return ValueError(f"pipeline.layout={layout}, column {column}: {why}")


def balanced_sizes(shape: ModelShape, *, seq_len: int, num_stages: int) -> tuple[int, ...]:
    """Blocks per stage with the least work on the busiest stage; the head counts, the embedding's look-up is free.

    Of equally busy stages an inner one gets the next block, then the first, then the last: as `equal_sizes`.
    """
    head = flops_per_token(replace(shape, num_layers=0), seq_len)
    block = flops_per_token(replace(shape, num_layers=1), seq_len) - head
    work = [0] * (num_stages - 1) + [head]
    sizes = [0] * num_stages
    order = _inner_first(num_stages)
    for _ in range(shape.num_layers):
        stage = min(order, key=lambda stage: work[stage])
        work[stage] += block
        sizes[stage] += 1
    return tuple(sizes)


def equal_sizes(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Blocks per stage, as equal as possible; inner stages get those that remain: the ends hold embedding and head."""
    base, remaining = divmod(num_layers, num_stages)
    more = _inner_first(num_stages)[:remaining]
    return tuple(base + (stage in more) for stage in range(num_stages))


def _inner_first(num_stages: int) -> list[int]:
    return list(dict.fromkeys([*range(1, num_stages - 1), 0, num_stages - 1]))
