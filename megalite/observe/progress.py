"""What a person sees of a run: a live line on a terminal, plain lines elsewhere, and a table at the end. Rank 0 only.

Plain lines come every `every` steps, and always for the first and the last step of the run, so a log file shows that
training began, and how it ended.
"""

from statistics import median
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

Record = dict[str, Any]
_RECENT = 20


class Progress:
    """Shows steps as they come; use it in a `with`, so that the terminal is restored also after an error."""

    def __init__(
        self, total_steps: int, *, start_step: int = 0, every: int = 10, console: Console | None = None
    ) -> None:
        """Steps start_step + 1 .. total_steps will come. `every` counts for plain output only."""
        self.total_steps, self.first, self.every = total_steps, start_step + 1, max(every, 1)
        self.console = console or Console()
        self._times: list[float] = []
        self._live = Live(console=self.console, refresh_per_second=4) if self.console.is_terminal else None

    def __enter__(self) -> "Progress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._live is not None:
            self._live.stop()

    def step(self, record: Record) -> None:
        """Show a training record of metrics.jsonl."""
        step = record["step"]
        self._times = [*self._times, record["step_time_s"]][-_RECENT:]
        line = step_line(record, self.total_steps, eta_s=(self.total_steps - step) * median(self._times))
        if self._live is not None:
            self._live.update(Text(line))
        elif step in (self.first, self.total_steps) or step % self.every == 0 or record["skipped"]:
            self._print(line)

    def evaluation(self, record: Record) -> None:
        """Show an evaluation record."""
        self.note(f"step {record['step']}: eval loss {_number(record['eval_loss'], '.4f')}")

    def note(self, text: str) -> None:
        """Print a line that stays, e.g. where a checkpoint went."""
        self._print(text)

    def _print(self, line: str) -> None:
        self.console.print(Text(line), soft_wrap=True)
        self.console.file.flush()


def step_line(record: Record, total_steps: int, *, eta_s: float) -> str:
    """One step in one line."""
    width = len(str(total_steps))
    parts = [
        f"step {record['step']:>{width}}/{total_steps}",
        f"loss {_number(record['loss'], '.4f')}",
        f"grad norm {_number(record['grad_norm'], '.3f')}",
        f"lr {record['lr']:.2e}",
        f"{_number(record['tokens_per_s'], ',.0f')} tokens/s",
    ]
    if record["mfu"] is not None:
        parts.append(f"mfu {100 * record['mfu']:.1f}%")
    parts.append(f"eta {duration(eta_s)}")
    if record["skipped"]:
        why = "no token is trained on" if record["grad_norm"] == 0 else "gradients are not finite"
        parts.append(f"SKIPPED: {why}")
    return "  ".join(parts)


def summarize(records: list[Record]) -> Record:
    """The figures of the final table from the records of a run, training and evaluation mixed.

    Times and rates are medians or sums over training steps; compilation in a first step does not move a median.
    """
    steps = [record for record in records if "step_time_s" in record]
    evals = [record for record in records if "eval_loss" in record]
    last = steps[-1] if steps else {}
    return {
        "steps": len(steps),
        "loss": last.get("loss"),
        "eval_loss": evals[-1]["eval_loss"] if evals else None,
        "tokens": last.get("tokens", 0),
        "tokens_per_s": median([record["tokens_per_s"] for record in steps]) if steps else None,
        "mfu": last.get("mfu"),
        "train_time_s": sum(record["step_time_s"] for record in steps),
        "memory_gb": max((record["memory_gb"] for record in steps), default=None),
        "skipped": sum(bool(record["skipped"]) for record in steps),
        "comm_bytes": last.get("comm_bytes", {}),
    }


def summary_table(records: list[Record], *, title: str = "run", paths: dict[str, str] | None = None) -> Table:
    """The table at the end of a run. `paths` adds rows such as {"checkpoint": "runs/tiny/..."}."""
    figures = summarize(records)
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    rows = [
        ("final loss", _number(figures["loss"], ".4f")),
        ("eval loss", _number(figures["eval_loss"], ".4f")),
        ("tokens", f"{figures['tokens']:,}"),
        ("tokens/s (median)", _number(figures["tokens_per_s"], ",.0f")),
        ("mfu", "unknown hardware" if figures["mfu"] is None else f"{100 * figures['mfu']:.1f}%"),
        ("time in steps", duration(figures["train_time_s"])),
        ("peak memory", f"{_number(figures['memory_gb'], '.2f')} GiB"),
        ("skipped steps", str(figures["skipped"])),
    ]
    rows += [(f"sent per step, {axis}", _megabytes(count)) for axis, count in sorted(figures["comm_bytes"].items())]
    for name, value in [*rows, *(paths or {}).items()]:
        table.add_row(name, str(value))
    return table


def duration(seconds: float) -> str:
    """A time for people: 4.2s, 3m05s, 2h07m, 3d04h."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 24 else f"{hours // 24}d{hours % 24:02d}h"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.2f} MB"
