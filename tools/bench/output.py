"""What the benches tell while they run, and how they end: the report printed, its tables and all numbers written."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Say = Callable[[str], None]


def progress() -> Say:
    """Prints a line to stderr with the seconds since now."""
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - start:4.0f} s] {text}", file=sys.stderr, flush=True)

    return say


def publish(
    report: Callable[..., str],
    numbers: Callable[..., dict],
    *,
    of: tuple,
    about: dict[str, Any],
    markdown: Path | None,
    json_file: Path | None,
) -> None:
    """Print the report of what was found; where a file is given, write it as markdown, and the numbers as JSON.

    Args:
        of, about: what `report` and `numbers` are called with, by place and by name.
    """
    print(report(*of, **about, markdown=False))
    if markdown:
        markdown.write_text(report(*of, **about, markdown=True) + "\n")
    if json_file:
        json_file.write_text(json.dumps(numbers(*of, **about), indent=2) + "\n")
