"""The tables of tools/bench_comm.py, plain or Markdown, and its numbers for JSON. A missed goal is said in words."""

import statistics
from dataclasses import asdict

from bench.comm_cases import KB, MB, Case, Plan, Timing, goal, holds
from bench.comm_measure import DTENSOR, GOALS, Found
from bench.measure import Effort, Result
from bench.rows import Work
from bench.tables import Table, table_of

COLLECTIVES = ("op", "ranks", "dtype", "size", "gloo", "own", "shm", "shm GB/s", "gloo/shm", "own/shm", "goal", "")
STEPS = ("training step", "tokens/s", "CPU s/step", "wire MB/step", "ledger MB/step", "x DTensor", "goal", "")
TRAFFIC = ("axis", "op", "MB per step, all ranks", "share")


def report(found: Found, *, plan: Plan, work: Work, effort: Effort, where: dict, markdown: bool) -> str:
    """The whole text."""
    table = table_of(markdown)
    parts = [
        f"{where['date']}, {where['cpu']}, {where['cores']} cores, torch {where['torch']}, load before the start "
        f"{where['load_average']:.1f}; one thread a rank, contestants alternated, medians."
    ]
    if found.timings:
        parts.append(
            f"Collectives, {plan.rounds} turns each. Sizes are whole tensors'; GB/s is size over time. gloo is "
            "megalite over gloo (its reduce_scatter is an all-to-all and a sum), own is gloo's op of that name."
        )
        parts.append(table(COLLECTIVES, [collective_line(timing) for timing in found.timings]))
    if found.steps:
        parts.append(f"tp 2 + sp: {work.text()}; {effort.rounds} x {effort.steps} steps.")
        parts.append(table(STEPS, step_lines(found.steps)))
        parts.append("Bytes per step by axis and op, by the ledger (payload; gloo and shm move the same):")
        parts.append(table(TRAFFIC, traffic_lines(found.steps)))
    parts += missed(found)
    parts += [f"Note: {note}." for note in found.notes]
    parts += [f"shm did not run on {size} ranks: {why}" for size, why in found.missing.items()]
    if where["load_average"] > 0.5 * where["cores"]:
        parts.append("Note: the machine was busy before the start; take these numbers for nothing but a check.")
    parts += [f"FAILED {text}" for text in found.failed]
    return "\n\n".join(parts)


def collective_line(timing: Timing) -> tuple[str, ...]:
    """One case."""
    case, wanted = timing.case, goal(timing.case)
    ours = timing.median_s("shm")
    return (
        case.op,
        str(case.size),
        case.dtype if case.num_bytes else "",
        size_text(case.num_bytes),
        *(time_text(timing.median_s(name)) for name in ("gloo", "own", "shm")),
        "" if ours is None or not case.num_bytes else f"{case.num_bytes / ours / 1e9:.2f}",
        *(ratio_text(timing.ratio(name)) for name in ("gloo", "own")),
        "" if wanted is None else f"{'own' if wanted[0] == 'own' else 'gloo'} >= {wanted[1]:g}x",
        verdict(holds(timing)),
    )


def step_lines(steps: list[Result]) -> Table:
    """One line per contestant of the training step."""
    return [
        (
            step.label,
            f"{step.tokens_per_s:.0f}",
            f"{step.cpu_s:.3g}",
            "not measured" if step.wire_bytes is None else f"{step.wire_bytes / 1e6:.1f}",
            "" if step.traffic is None else f"{sum(step.traffic.values()) / 1e6:.1f}",
            ratio_text(step_ratio(step, steps)),
            f">= {GOALS[step.label]:g}x" if step.label in GOALS else "",
            verdict(step_holds(step, steps)),
        )
        for step in steps
    ]


def step_ratio(step: Result, steps: list[Result]) -> float | None:
    """How many times DTensor's tokens/s: the median over rounds of the ratio within a round."""
    theirs = next((other for other in steps if other.label == DTENSOR.label), None)
    if theirs is None:
        return None
    return statistics.median(b / a for a, b in zip(step.block_s, theirs.block_s, strict=True))


def step_holds(step: Result, steps: list[Result]) -> bool | None:
    """Whether a contestant of ours is as fast as promised."""
    ratio = step_ratio(step, steps)
    return None if step.label not in GOALS or ratio is None else ratio >= GOALS[step.label]


def traffic_lines(steps: list[Result]) -> Table:
    """The ledger's bytes by axis and op, largest first."""
    traffic = next((step.traffic for step in steps if step.traffic), {})
    total = sum(traffic.values())
    ordered = sorted(traffic.items(), key=lambda item: -item[1])
    lines = [(*key.split(), f"{n / 1e6:.3f}", f"{n / total:.1%}") for key, n in ordered]
    return [*lines, ("all", "", f"{total / 1e6:.3f}", "100%")]


def missed(found: Found) -> list[str]:
    """One line for each goal that was not met."""
    lines = []
    for timing in found.timings:
        if holds(timing) is False:
            ratios = ", ".join(f"{name} {ratio_text(timing.ratio(name))}" for name in timing.case.contestants[1:])
            lines.append(f"MISSED {name_of(timing.case)}: {ratios}; goal {goal(timing.case)[1]:g}x")
    for step in found.steps:
        if step_holds(step, found.steps) is False:
            ratio = step_ratio(step, found.steps)
            lines.append(f"MISSED {step.label}: {ratio_text(ratio)} DTensor's tokens/s; goal {GOALS[step.label]:g}x")
    return lines


def numbers(found: Found, *, plan: Plan, work: Work, effort: Effort, where: dict) -> dict:
    """Everything, for JSON."""
    return {
        "machine": where,
        "plan": asdict(plan),
        "work": asdict(work),
        "effort": asdict(effort),
        "collectives": [
            asdict(timing)
            | {"ratios": {name: timing.ratio(name) for name in timing.case.contestants[1:]}, "holds": holds(timing)}
            for timing in found.timings
        ],
        "steps": [
            asdict(step) | {"ratio_to_dtensor": step_ratio(step, found.steps), "holds": step_holds(step, found.steps)}
            for step in found.steps
        ],
        "missed": missed(found),
        "missing": found.missing,
        "notes": found.notes,
        "failed": found.failed,
    }


def name_of(case: Case) -> str:
    """A case in words."""
    return " ".join(filter(None, (case.op, size_text(case.num_bytes), case.dtype, f"on {case.size} ranks")))


def size_text(num_bytes: int) -> str:
    """64 KB, 4 MB; nothing for nothing."""
    if num_bytes == 0:
        return ""
    return f"{num_bytes // MB} MB" if num_bytes >= MB else f"{num_bytes // KB} KB"


def time_text(seconds: float | None) -> str:
    """Microseconds below 10 ms."""
    if seconds is None:
        return ""
    return f"{seconds * 1e6:.0f} us" if seconds < 0.01 else f"{seconds * 1e3:.1f} ms"


def ratio_text(ratio: float | None) -> str:
    """1.23x."""
    return "" if ratio is None else f"{ratio:.2f}x"


def verdict(held: bool | None) -> str:
    """What stands behind a goal."""
    return {True: "holds", False: "MISSED", None: ""}[held]
