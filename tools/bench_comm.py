"""Communication on CPU ranks: shared memory against gloo, op by op and in whole tensor parallel steps.

Everything is measured side by side in this one run, in turns; ratios are medians of ratios within a turn. Goals that
are missed are printed, and the exit code is 0 all the same. Run it on an idle machine: python tools/bench_comm.py
[--quick] [--out FILE]. `--quick` takes under 3 minutes on 2 idle cores; `--tiny` tests this file, not the speed.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from bench import comm_cases  # noqa: E402
from bench.comm_measure import Found, measure_collectives, measure_steps  # noqa: E402
from bench.comm_tables import numbers, report  # noqa: E402
from bench.measure import Effort  # noqa: E402
from bench.output import progress, publish  # noqa: E402
from bench.rows import TINY, Work  # noqa: E402
from bench.tables import machine  # noqa: E402

SECTIONS = ("collectives", "step")
FULL = Effort(rounds=8, steps=2, warmup=2)
QUICK = Effort(rounds=5, steps=1, warmup=1)
SMALLEST = Effort(rounds=1, steps=1, warmup=1)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer sizes and turns")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, for tests of this tool")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="only these sections")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all numbers as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Measure, print and write; 0, or 1 when something failed. A missed goal is no failure."""
    options = parse(arguments)
    plan = comm_cases.TINY if options.tiny else comm_cases.QUICK if options.quick else comm_cases.FULL
    work = TINY if options.tiny else Work()
    effort = SMALLEST if options.tiny else QUICK if options.quick else FULL
    where, say, found = machine(), progress(), Found()

    with tempfile.TemporaryDirectory(prefix="bench_comm_") as folder:
        if "collectives" in options.only:
            measure_collectives(plan, found, folder=Path(folder), say=say)
        if "step" in options.only:
            measure_steps(work, found, effort=effort, folder=Path(folder), say=say)
    say("done")
    about = {"plan": plan, "work": work, "effort": effort, "where": where}
    publish(report, numbers, of=(found,), about=about, markdown=options.markdown, json_file=options.out)
    return 1 if found.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
