"""Medians and 90th percentiles of file and function sizes against the project's aims: `python -m tests.style.sizes`."""

from tests.style.rules import Source, all_sources, functions, length

AIMS = {"file": (180, 320), "function": (12, 40)}
"""Median and 90th percentile, in lines."""


def percentile(values: list[int], percent: int) -> int:
    """The smallest value that at least `percent` of all values do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)] if ordered else 0


def measure(sources: list[Source]) -> dict[str, tuple[int, int]]:
    """(median, 90th percentile) of the lengths of megalite's files and functions; empty files do not count."""
    package = [source for source in sources if source.in_package and source.text.strip()]
    lengths = {
        "file": [len(source.text.splitlines()) for source in package],
        "function": [length(node) for source in package for node in functions(source)],
    }
    return {name: (percentile(values, 50), percentile(values, 90)) for name, values in lengths.items()}


def report(sources: list[Source]) -> str:
    """One line per kind: measured and aimed at."""
    rows = measure(sources).items()
    return "\n".join(
        f"{name}: median {got[0]} (aim {AIMS[name][0]}), p90 {got[1]} (aim {AIMS[name][1]})" for name, got in rows
    )


if __name__ == "__main__":
    print(report(all_sources()))
