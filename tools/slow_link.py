"""Training steps behind a slow link: how much communication goes under computation, megalite against torch.

Two ranks in two network namespaces, joined by a link of a given rate (and delay), gloo between them. For each layout:
computation alone, communication alone, the step; from them the hidden part. Needs root, ip and tc; run it on an idle
machine: sudo python tools/slow_link.py [--only tp] [--rate 200mbit --rate 1gbit] [--delay-ms 1] [--out FILE].
A wider model (--hidden 1024 --layers 2) has more computation per byte: what tp sends grows with the width, what it
computes with its square. Goals that are missed are printed, and the exit code is 0 all the same. `--tiny` tests this
file, not the speed.
"""

import argparse
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from bench import link_rows, network  # noqa: E402
from bench.job import prepare_weights  # noqa: E402
from bench.link import Speed  # noqa: E402
from bench.link_measure import WEIGHTS, measure_link  # noqa: E402
from bench.link_rows import LinkFound  # noqa: E402
from bench.link_tables import numbers, report  # noqa: E402
from bench.measure import Effort  # noqa: E402
from bench.output import progress, publish  # noqa: E402
from bench.rows import TINY, Work  # noqa: E402
from bench.tables import machine  # noqa: E402

FULL = Effort(rounds=5, steps=3, warmup=2)
QUICK = Effort(rounds=2, steps=2, warmup=2)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    names = [row.name for row in link_rows.LINK_ROWS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=names, help="only these layouts; default tp zero3")
    parser.add_argument("--rate", action="append", help="of the link, as tc writes it; default 200mbit and 1gbit")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="each way; a relay in user space costs some CPU")
    parser.add_argument("--hidden", type=int, default=Work.hidden_size, help="width of the model; ffn is 3 times that")
    parser.add_argument("--layers", type=int, default=Work.num_layers)
    parser.add_argument("--quick", action="store_true", help="2 turns instead of 5")
    parser.add_argument("--tiny", action="store_true", help="a toy model, for tests of this tool")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all numbers as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables")
    return parser.parse_args(arguments)


def wrong(options: argparse.Namespace, speeds: list[Speed]) -> str | None:
    """What can't be done as asked."""
    try:
        for speed in speeds:
            _ = speed.bytes_per_s
    except ValueError as error:
        return str(error)
    if options.hidden < 64 or options.hidden % 64:
        return f"--hidden {options.hidden} is no multiple of 64, the size of two heads; use e.g. 256 or 1024"
    if options.layers < 1:
        return f"--layers {options.layers} must be at least 1"
    if options.delay_ms < 0:
        return f"--delay-ms {options.delay_ms:g} is negative; give milliseconds, or 0 for a plain veth pair"
    if not network.available():
        return "slow_link makes network namespaces, which needs root on Linux; run it with sudo"
    return None


def wanted_work(options: argparse.Namespace) -> Work:
    """The usual model, or a wider or flatter one, with heads of the same size."""
    width, usual = options.hidden, Work()
    heads = usual.num_heads * width // usual.hidden_size
    return replace(usual, num_layers=options.layers, hidden_size=width, ffn_size=3 * width, num_heads=heads)


def main(arguments: list[str]) -> int:
    """Measure, print and write; 0, 1 when something failed, 2 for a wrong input. A missed goal is no failure."""
    options = parse(arguments)
    speeds = [Speed(rate, options.delay_ms) for rate in options.rate or ("200mbit", "1gbit")]
    if problem := wrong(options, speeds):
        print(problem, file=sys.stderr)
        return 2
    rows = link_rows.selected(options.only)
    work, effort = TINY if options.tiny else wanted_work(options), QUICK if options.quick or options.tiny else FULL
    where, say, found = machine(), progress(), LinkFound()

    with tempfile.TemporaryDirectory(prefix="slow_link_") as folder:
        prepare_weights(work, Path(folder) / WEIGHTS)
        for speed in speeds:
            measure_link(rows, work, found, speed=speed, effort=effort, folder=Path(folder), say=say)
    say("done")
    about = {"work": work, "effort": effort, "where": where}
    publish(report, numbers, of=(rows, found), about=about, markdown=options.markdown, json_file=options.out)
    return 1 if found.failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks are ended and temporary files removed
    sys.exit(main(sys.argv[1:]))
