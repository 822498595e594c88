"""What a person sees of a verification: a progress bar, what was shrunk, the table, and the first difference."""

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from megalite.config.schema import Config
from megalite.verify.compare import Comparison, Difference, holders, place_of, who
from megalite.verify.run import RankReport

MAX_FAULTS = 3


class Bar:
    """The progress of all children; one part is one thing that a child says it begins. Use it in a `with`."""

    def __init__(self, console: Console, *, num_parts: int):
        columns = (TextColumn("verify"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        # refreshed by hand: a thread must not exist when ranks are forked
        self.progress = Progress(*columns, console=console, auto_refresh=False, transient=True)
        self.task = self.progress.add_task("start", total=num_parts)

    def __enter__(self) -> "Bar":
        self.progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.progress.stop()

    def heard(self, name: str, text: str) -> None:
        """A child begins something."""
        self.progress.update(self.task, advance=1, description=f"{name}, {text}", refresh=True)


def table(comparisons: dict[str, Comparison]) -> Table:
    """What was compared: how often, the worst relative difference, and the largest that rounding explains."""
    result = Table(title="layout against one device", title_justify="left", box=SIMPLE)
    for column in ("dtype", "compared", "number", "worst", "rounding", ""):
        result.add_column(column, justify="left" if column in ("dtype", "compared", "") else "right", no_wrap=True)
    for label, comparison in comparisons.items():
        for row in comparison.rows.values():
            verdict = "ok" if not row.num_wrong else f"{row.num_wrong} differ"
            result.add_row(label, row.what, str(row.num), f"{row.error:.1e}", f"{row.bound:.1e}", verdict)
    return result


def failure(label: str, comparison: Comparison, config: Config, reports: Sequence[RankReport]) -> str:
    """The first difference, where it is and who holds it; then the other complaints."""
    lines = []
    if comparison.differences:
        first, tensor = comparison.differences[0], comparison.first_tensor
        lines.append(f"{label}: first difference: {describe(first, config, reports)}")
        if tensor is not None and tensor is not first:
            lines.append(f"{label}: first tensor that differs: {describe(tensor, config, reports)}")
    lines += [f"{label}: {text}" for text in comparison.faults[:MAX_FAULTS]]
    if len(comparison.faults) > MAX_FAULTS:
        lines.append(f"{label}: and {len(comparison.faults) - MAX_FAULTS} more complaints")
    return "\n".join(lines)


def describe(difference: Difference, config: Config, reports: Sequence[RankReport]) -> str:
    """What differs, where, by how much, and what rounding would explain."""
    size = f"by {difference.error:.2e} relative; rounding explains {difference.bound:.1e}"
    if not difference.name:
        return f"{difference.what} of step {difference.step + 1} differs {size}"
    ranks = ", ".join(who(report) for report in holders(difference, reports)) or "no rank"
    at = list(difference.index)
    return (
        f"{difference.what} of {difference.name} ({place_of(difference.name, config)}) of step {difference.step + 1} "
        f"differs {size}; worst at {at}, held by {ranks}"
    )
