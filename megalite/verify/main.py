"""`megalite verify`: run a config's layout, shrunk, on gloo ranks and on one device, and compare everything.

float64 decides: there rounding explains about 1e-11, so any fault of sharding, reduction or scheduling stands out.
float32 checks the same code in the dtype of main params and, where asked for, gradients reduced in bf16.
"""

import tempfile

from rich.console import Console

from megalite.config.schema import Config
from megalite.train.report import layout_name
from megalite.verify.bounds import bounds
from megalite.verify.compare import Comparison, compare
from megalite.verify.processes import ChildrenError, run_layout
from megalite.verify.report import Bar, failure, table
from megalite.verify.run import RankReport
from megalite.verify.shrink import NUM_STEPS, Shrunk, shrink

LIMIT_S = 300.0
"""Of the whole run; run.timeout_s may be shorter."""
PARTS = 3 + NUM_STEPS
"""What a run says it begins: build, the steps, evaluation, copies; the ranks also take a non-finite step, once."""
OK, DIFFERENT = 0, 1


def verify(config: Config, console: Console | None = None) -> int:
    """Check that the config's layout trains as one device does; prints what was compared.

    Returns:
        0 when everything agrees, 1 when something differs or a rank fails.
    """
    console = console or Console()
    shrunk = {compute: shrink(config, compute) for compute in ("fp64", "fp32")}
    _announce(shrunk["fp64"], console)
    try:
        reports = _run(shrunk, console)
    except ChildrenError as error:
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        console.print("FAILED: the layout does not run", markup=False)
        return DIFFERENT
    compared = {label: compare_with_device(shrunk[label], *reports[label]) for label in shrunk}
    console.print(table(compared))
    for label, comparison in compared.items():
        if not comparison.equal:
            text = failure(label, comparison, shrunk[label].layout, reports[label][0])
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    equal = all(comparison.equal for comparison in compared.values())
    verdict = "OK: the layout trains" if equal else "FAILED: the layout does not train"
    console.print(f"{verdict} as one device does", markup=False)
    return OK if equal else DIFFERENT


def compare_with_device(shrunk: Shrunk, reports: list[RankReport], device: RankReport) -> Comparison:
    """The comparison of one precision."""
    reference = device.record
    assert reference is not None, "a run of one rank keeps its record"
    return compare(reports, reference, bounds(shrunk.layout, reference))


def _run(shrunk: dict[str, Shrunk], console: Console) -> dict[str, tuple[list[RankReport], RankReport]]:
    layout = shrunk["fp64"].layout
    num_parts = len(shrunk) * PARTS * (layout.world_size + 1) + layout.world_size
    configs = {label: (pair.layout, pair.device) for label, pair in shrunk.items()}
    limit_s = min(LIMIT_S, max(layout.run.timeout_s, 1.0))
    with tempfile.TemporaryDirectory(prefix="megalite-verify-") as directory, Bar(console, num_parts=num_parts) as bar:
        return run_layout(configs, directory, limit_s=limit_s, heard=bar.heard)


def _announce(shrunk: Shrunk, console: Console) -> None:
    layout = shrunk.layout
    lines = [
        f"verifying {layout_name(layout)} on {layout.world_size} CPU ranks, {NUM_STEPS} steps in fp64, then in fp32",
        *(f"  {note}" for note in shrunk.notes),
    ]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
