"""The tables of tools/bench_train.py: plain text, Markdown, and numbers for JSON.

A ratio says how many times better megalite is than the best opponent of its row in that column: speeds ours / best,
everything else best / ours; the speed's is the median over rounds of the ratio within a round.
"""

import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from bench.goals import GOALS_HEADER, verdicts
from bench.measure import Effort, Measured, Result, median_ratio
from bench.rows import Row, Work

HEADER = ("row", "what", "tokens/s", "CPU s/step", "wire MB/step", "ledger MB/step", "peak RSS MB/rank", "loss diff")
RATIO_HEADER = ("row", "tokens/s", "on gloo", "CPU s", "wire bytes", "peak RSS", "best opponents, by column")
COLUMNS = ("tokens_per_s", "gloo_tokens_per_s", "cpu_s", "wire_bytes", "rss")
Table = list[tuple[str, ...]]


def lines_of(rows: list[Row], found: Measured) -> Table:
    """One line per contestant."""
    titles = {row.name: row.title for row in rows}
    return [
        (
            titles[r.row],
            r.label,
            f"{r.tokens_per_s:.0f}",
            f"{r.cpu_s:.3g}",
            _wire(r),
            "-" if r.ledger_bytes is None else f"{r.ledger_bytes / 1e6:.1f}",
            " .. ".join(dict.fromkeys(f"{peak / 1e6:.0f}" for peak in r.peak_rss_bytes)),
            f"{r.loss_difference:.1e}",
        )
        for r in found.results
    ]


def _wire(result: Result) -> str:
    if result.wire_bytes is None:
        return "not measured"
    return f"{result.wire_bytes / 1e6:.1f}" + ("" if result.on_wire else " + shm")


def ratios(rows: list[Row], found: Measured) -> list[dict]:
    """Per row and column, how many times better megalite is, and than whom.

    Speed, CPU and memory are those of its defaults; wire bytes and a second speed those of the run with all on gloo.
    """
    table = []
    for row in rows:
        own = [r for r in found.results if r.row == row.name]
        ours = [r for r in own if r.ours]
        beside = {c.label for c in row.beside}
        opponents = [r for r in own if not r.ours and r.label not in beside]
        if ours and opponents:
            table.append({"row": row.name, "title": row.title} | _columns(ours, opponents))
    return table


def _columns(ours: list[Result], opponents: list[Result]) -> dict:
    speed = max(opponents, key=lambda r: r.tokens_per_s)
    on_wire = next((r for r in reversed(ours) if r.on_wire), None)
    columns = {"tokens_per_s": (_speed_ratio(speed, ours[0]), speed.label)}
    columns["gloo_tokens_per_s"] = (_speed_ratio(speed, on_wire) if on_wire and on_wire.wire_bytes else None, "")
    costs = {
        "cpu_s": (ours[0], lambda r: r.cpu_s),
        "wire_bytes": (on_wire, lambda r: r.wire_bytes),
        "rss": (ours[0], lambda r: r.peak_rss_bytes[1]),
    }
    for name, (mine, cost) in costs.items():
        known = [r for r in opponents if cost(r)]
        if not known or mine is None or not cost(mine):  # one process sends nothing
            columns[name] = (None, "")
            continue
        best = min(known, key=cost)
        columns[name] = (cost(best) / cost(mine), best.label)
    return {name: {"ratio": ratio, "best": label} for name, (ratio, label) in columns.items()}


def _speed_ratio(theirs: Result, mine: Result) -> float:
    return median_ratio(theirs.block_s, mine.block_s)


def ratio_lines(table: list[dict]) -> Table:
    """The ratios as text."""
    lines = []
    for row in table:
        cells = ["-" if row[n]["ratio"] is None else f"{row[n]['ratio']:.2f}x" for n in COLUMNS]
        lines.append(
            (row["title"], *cells, ", ".join(dict.fromkeys(row[n]["best"] for n in COLUMNS if row[n]["best"])))
        )
    return lines


def plain(header: tuple[str, ...], lines: Table) -> str:
    """Columns padded with spaces."""
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in (header, *lines)
    )


def _markdown(header: tuple[str, ...], lines: Table) -> str:
    rule = tuple("---" for _ in header)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines))


def table_of(markdown: bool) -> Callable[[tuple[str, ...], Table], str]:
    """The form that tables are printed in."""
    return _markdown if markdown else plain


def machine() -> dict:
    """Where and when this ran."""
    info = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), "unknown CPU")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "load_average": os.getloadavg()[0],
    }


def report(rows: list[Row], found: Measured, *, work: Work, effort: Effort, where: dict, markdown: bool) -> str:
    """The whole text."""
    table = table_of(markdown)
    about = (
        f"{where['date']}, {where['cpu']}, {where['cores']} cores, torch {where['torch']}, load before the start "
        f"{where['load_average']:.1f}. {work.text()}; one thread a rank; medians of {effort.rounds} x {effort.steps} "
        "steps, contestants alternated."
    )
    parts = [about, table(HEADER, lines_of(rows, found))]
    parts += ["How many times better megalite is than the best opponent in each column:"]
    parts += [table(RATIO_HEADER, ratio_lines(ratios(rows, found)))]
    if judged := verdicts(ratios(rows, found), found, work):
        parts += ["Goals:", table(GOALS_HEADER, [verdict.line() for verdict in judged])]
    parts += [f"Note: {note}." for note in found.notes]
    if where["load_average"] > 0.5 * where["cores"]:
        parts.append("Note: the machine was busy before the start; take ratios and CPU seconds, not tokens/s.")
    parts += [f"FAILED {text}" for text in found.failed]
    return "\n\n".join(parts)


def numbers(rows: list[Row], found: Measured, *, work: Work, effort: Effort, where: dict) -> dict:
    """Everything, for JSON."""
    return {
        "machine": where,
        "work": asdict(work),
        "effort": asdict(effort),
        "rows": [asdict(row) for row in rows],
        "results": [asdict(result) for result in found.results],
        "ratios": ratios(rows, found),
        "goals": [asdict(verdict) for verdict in verdicts(ratios(rows, found), found, work)],
        "notes": found.notes,
        "failed": found.failed,
    }
