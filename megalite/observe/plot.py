"""loss.png: the loss of a run over its steps, drawn from metrics.jsonl without a display.

The raw loss is light, its centred running mean strong; evaluations are points; the rate has the right axis. Skipped
steps are marked at the bottom, so a gap in the curve has a reason.
"""

from itertools import accumulate
from math import isfinite
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Record = dict[str, Any]
_LOSS, _EVAL, _LR, _SKIP = "#1f6fb4", "#d9480f", "#8a8f98", "#c92a2a"


def plot_loss(records: list[Record], path: Path | str, *, title: str = "") -> Path:
    """Draw training and evaluation records (of metrics.jsonl) into a PNG and return its path.

    Raises:
        ValueError: when there is no finite loss to draw.
    """
    losses = [(r["step"], r["loss"]) for r in records if r.get("loss") is not None and isfinite(r["loss"])]
    evals = [(r["step"], r["eval_loss"]) for r in records if r.get("eval_loss") is not None]
    if not losses and not evals:
        raise ValueError(f"{path}: nothing to draw, the metrics hold no finite loss")
    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rate = axes.twinx()
    axes.set_zorder(rate.get_zorder() + 1)  # the loss lies over the rate
    axes.patch.set_visible(False)
    _draw_rate(rate, [(r["step"], r["lr"]) for r in records if "lr" in r])
    _draw_losses(axes, losses, evals)
    _mark_skipped(axes, [r["step"] for r in records if r.get("skipped")])
    _dress(axes, rate, title=title)
    figure.savefig(path)
    return Path(path)


def smooth(values: list[float], half_width: int) -> list[float]:
    """Centred running mean over up to 2 * half_width + 1 values; narrower towards both ends, so it never lags."""
    sums = [0.0, *accumulate(values)]
    means = []
    for i in range(len(values)):
        half = min(half_width, i, len(values) - 1 - i)
        means.append((sums[i + half + 1] - sums[i - half]) / (2 * half + 1))
    return means


def _draw_losses(axes: Axes, losses: list[tuple[int, float]], evals: list[tuple[int, float]]) -> None:
    if losses:
        steps, values = zip(*losses, strict=True)
        few = len(steps) < 30
        marker = "o" if few else None
        axes.plot(steps, values, color=_LOSS, alpha=0.3, linewidth=1, marker=marker, markersize=3, label="train loss")
        means = smooth(list(values), max(len(values) // 40, 1))
        axes.plot(steps, means, color=_LOSS, linewidth=2, label="train loss, smoothed")
    if evals:
        steps, values = zip(*evals, strict=True)
        axes.plot(steps, values, "D", color=_EVAL, markersize=6, markeredgecolor="white", label="eval loss")
        axes.annotate(
            f"{values[-1]:.3f}", (steps[-1], values[-1]), textcoords="offset points", xytext=(-4, 8), ha="right",
            color=_EVAL, fontsize=9,
        )  # fmt: skip


def _draw_rate(rate: Axes, points: list[tuple[int, float]]) -> None:
    if points:
        steps, values = zip(*points, strict=True)
        rate.plot(steps, values, color=_LR, linewidth=1.2, linestyle="--", label="learning rate")
        rate.set_ylim(0, max(values) * 1.1 or 1.0)


def _mark_skipped(axes: Axes, steps: list[int]) -> None:
    if steps:
        low = axes.get_ylim()[0]
        axes.plot(steps, [low] * len(steps), "x", color=_SKIP, clip_on=False, label="skipped steps")
        axes.set_ylim(bottom=low)


def _dress(axes: Axes, rate: Axes, *, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    rate.set_ylabel("learning rate", color=_LR)
    rate.tick_params(colors=_LR)
    rate.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.25)
    for spine in (axes.spines["top"], rate.spines["top"]):
        spine.set_visible(False)
    figure = axes.get_figure()
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
