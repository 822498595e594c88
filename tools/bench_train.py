"""Whole training steps on CPU ranks: megalite against torch's own pieces (and DeepSpeed where it is installed).

All contestants of a row run side by side in this one run, in turns of a few steps, from the same weights on the same
tokens; tokens/s, CPU seconds, bytes on the wire (a network namespace's count: needs root), peak memory and losses are
taken the same way for all. megalite runs with its defaults, where collectives on one host go through shared memory, and
on gloo like the others, which is what its wire bytes are taken from. Goals are printed with what was found.
Run it on an idle machine: python tools/bench_train.py [--quick] [--markdown FILE]. `--quick` takes under 10 minutes on
2 idle cores; `--tiny` tests this file, not the speed.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from bench.measure import Effort, measure  # noqa: E402
from bench.output import progress, publish  # noqa: E402
from bench.rows import ROWS, TINY, Work, selected  # noqa: E402
from bench.tables import machine, numbers, report  # noqa: E402

FULL = Effort(rounds=6, steps=3, warmup=2)
QUICK = Effort(rounds=2, steps=2, warmup=2)
SMALLEST = Effort(rounds=2, steps=1, warmup=1)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--tiny", action="store_true", help="a toy model, for tests of this tool")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help=f"only these of {', '.join(r.name for r in ROWS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Measure, print and write; 0, 1 when a row failed, 2 for a wrong input."""
    options = parse(arguments)
    try:
        rows = selected(options.rows)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    work = TINY if options.tiny else Work()
    effort = SMALLEST if options.tiny else QUICK if options.quick else FULL
    where, say = machine(), progress()

    with tempfile.TemporaryDirectory(prefix="bench_train_") as folder:
        found = measure(rows, work, effort=effort, folder=Path(folder), say=say)
    say("done")
    about = {"work": work, "effort": effort, "where": where}
    publish(report, numbers, of=(rows, found), about=about, markdown=options.markdown, json_file=options.json)
    return 1 if found.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
