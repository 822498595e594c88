"""The tables of tools/slow_link.py, plain or Markdown, and its numbers for JSON. A missed goal is said in words."""

from dataclasses import asdict

from bench.link_rows import FSDP, LinkFound, LinkRow, Times, Verdict, verdicts
from bench.measure import Effort
from bench.rows import Work
from bench.tables import table_of

HEADER = (
    "link",
    "layout",
    "what",
    "compute s",
    "comm s",
    "step s",
    "hidden",
    "exposed s",
    "MB sent",
    "line s",
    "over floor",
    "x fully_shard",
)
MEANING = (
    "compute: nothing sent; comm: the step's collectives alone, one after the other; hidden = (compute + comm - step) "
    "/ min(compute, comm); exposed = step - compute; MB sent: by the rank that sends most, headers included; line: "
    "those bytes at the line's rate; over floor = step / max(compute, line)."
)


def report(rows: list[LinkRow], found: LinkFound, *, work: Work, effort: Effort, where: dict, markdown: bool) -> str:
    """The whole text."""
    titles = {row.name: row.title for row in rows}
    parts = [
        f"{where['date']}, {where['cpu']}, {where['cores']} cores, torch {where['torch']}, load before the start "
        f"{where['load_average']:.1f}. {work.text()}; one thread a rank, gloo between two network namespaces; medians "
        f"of {effort.rounds} x {effort.steps} steps, contestants alternated.",
        MEANING,
        table_of(markdown)(HEADER, [line(times, titles[times.row], found) for times in found.times]),
    ]
    parts += [verdict_text(*entry) for entry in all_verdicts(rows, found)]
    if where["load_average"] > 0.5 * where["cores"]:
        parts.append("Note: the machine was busy before the start; take these numbers for nothing but a check.")
    parts += [f"FAILED {text}" for text in found.failed]
    return "\n\n".join(parts)


def line(times: Times, title: str, found: LinkFound) -> tuple[str, ...]:
    """One contestant on one link."""
    fsdp = found.of(times.row, times.rate).get(FSDP.label)
    return (
        times.rate,
        title,
        times.label,
        f"{times.compute:.2f}",
        f"{times.comm:.2f}",
        f"{times.step:.2f}",
        f"{times.hidden:.0%}",
        f"{times.exposed:.2f}",
        f"{times.sent_bytes / 1e6:.1f}",
        f"{times.wire_s:.2f}",
        f"{times.over_floor:.2f}x",
        "" if fsdp is None or fsdp is times else f"{times.ratio(fsdp):.2f}x",
    )


def all_verdicts(rows: list[LinkRow], found: LinkFound) -> list[tuple[str, Verdict]]:
    """(link and layout, goal), in the table's order."""
    rates = dict.fromkeys(times.rate for times in found.times)
    return [
        (f"{rate}, {row.title}", verdict)
        for rate in rates
        for row in rows
        for verdict in verdicts(row, found.of(row.name, rate))
    ]


def verdict_text(where: str, verdict: Verdict) -> str:
    """One goal as a line."""
    possible = verdict.possible
    limit = "" if possible is None or possible >= 1 else f"; at most {possible:.2f} was possible, as compute is shorter"
    word = "holds" if verdict.holds else "MISSED"
    return f"{word}: {where}: {verdict.text}: {verdict.found:.2f}, goal {verdict.goal:g}{limit}"


def numbers(rows: list[LinkRow], found: LinkFound, *, work: Work, effort: Effort, where: dict) -> dict:
    """Everything, for JSON."""
    derived = ("hidden", "exposed", "wire_s", "over_floor")
    return {
        "machine": where,
        "work": asdict(work),
        "effort": asdict(effort),
        "times": [asdict(times) | {name: getattr(times, name) for name in derived} for times in found.times],
        "verdicts": [
            {"where": place, **asdict(verdict), "holds": verdict.holds} for place, verdict in all_verdicts(rows, found)
        ],
        "failed": found.failed,
    }
