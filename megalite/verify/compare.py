"""The comparison of a layout's record with the one-device record: the first difference, and a table of all.

First means: in the order of computation. Loss before gradients, gradients from the head to the embedding (as backward
makes them), their norm, update, weights; step after step.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from megalite.config.schema import Config
from megalite.verify.bounds import Bounds, norm, square_sum
from megalite.verify.run import RankReport, Record, Tensors

Scalars = dict[str, float]
WITHIN = ("mlp.down", "mlp", "mlp_norm", "attention.out", "attention", "attention_norm")
"""The order of backward in a block, by the longest prefix that fits."""


@dataclass(frozen=True)
class Difference:
    """A quantity that differs by more than rounding; `error` and `bound` are relative, `index` is the worst element."""

    step: int
    what: str
    name: str
    error: float
    bound: float
    index: tuple[int, ...] = ()


@dataclass
class Row:
    """A line of the table: how many quantities were compared, and the one nearest to (or furthest past) its bound."""

    what: str
    num: int = 0
    num_wrong: int = 0
    error: float = 0.0
    bound: float = math.inf

    def add(self, error: float, bound: float) -> None:
        """Count one quantity."""
        self.num += 1
        self.num_wrong += not error <= bound
        if not error / max(bound, 1e-300) <= self.error / max(self.bound, 1e-300) or self.num == 1:
            self.error, self.bound = error, bound


@dataclass
class Comparison:
    """All that was compared. `faults` are complaints that are not about one quantity."""

    rows: dict[str, Row] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Nothing differs by more than rounding."""
        return not self.differences and not self.faults

    @property
    def first_tensor(self) -> Difference | None:
        """The first difference that is a tensor's."""
        return next((d for d in self.differences if d.name), None)

    def add(self, step: int, what: str, name: str, *, error: float, bound: float, index: tuple[int, ...] = ()) -> None:
        """Take in one quantity."""
        self.rows.setdefault(what, Row(what)).add(error, bound)
        if not error <= bound:  # also NaN
            self.differences.append(Difference(step, what, name, error, bound, index))


def compare(reports: Sequence[RankReport], reference: Record, allowed: Bounds) -> Comparison:
    """Compare the ranks' reports of a layout with the one-device record."""
    result = Comparison()
    record = reports[0].record
    assert record is not None, "rank 0 reports the record"
    result.faults += _names_fault(record, reference)
    if not result.faults:
        _compare_steps(record, reference, allowed, result)
    result.faults += _scalars_fault(reports)
    for report in reports:
        result.faults += [f"{who(report)}: {text}" for text in report.faults if text not in "\n".join(result.faults)]
    return result


def _compare_steps(record: Record, reference: Record, allowed: Bounds, result: Comparison) -> None:
    _tensors(result, 0, "initial weights", record.initial, reference.initial, 0.0, 0.0)
    before, before_reference, drift = record.initial, reference.initial, 0.0  # drift: what weights may differ by
    for step, (ours, theirs, (grads, weights)) in enumerate(
        zip(record.steps, reference.steps, allowed.steps, strict=True)
    ):
        by_weights = drift * theirs.scalars["grad_norm"]
        loss_bound = allowed.relative + by_weights / max(abs(theirs.scalars["loss"]), 1e-300)
        norm_bound = allowed.relative + grads / max(norm(theirs.grads), 1e-300)
        _scalars(result, step, ("loss", "valid_tokens"), ours.scalars, theirs.scalars, loss_bound)
        _tensors(result, step, "gradient", ours.grads, theirs.grads, allowed.relative, grads)
        _scalars(result, step, ("grad_norm",), ours.scalars, theirs.scalars, norm_bound)
        update, expected = _minus(ours.weights, before), _minus(theirs.weights, before_reference)
        _tensors(result, step, "update", update, expected, 0.0, weights + drift)
        _tensors(result, step, "weights", ours.weights, theirs.weights, 0.0, weights)
        before, before_reference, drift = ours.weights, theirs.weights, weights
    grad_norm, loss = reference.steps[-1].scalars["grad_norm"], reference.eval_loss
    ours, theirs = {"eval_loss": record.eval_loss}, {"eval_loss": loss}
    bound = allowed.relative + drift * grad_norm / max(abs(loss), 1e-300)
    _scalars(result, len(record.steps), ("eval_loss",), ours, theirs, bound)


def _scalars(result: Comparison, step: int, names: Sequence[str], ours: Scalars, theirs: Scalars, bound: float) -> None:
    for name in names:
        error = abs(ours[name] - theirs[name]) / max(abs(theirs[name]), 1e-300)
        result.add(step, name.replace("_", " "), "", error=error, bound=0.0 if name == "valid_tokens" else bound)


def _tensors(
    result: Comparison, step: int, what: str, ours: Tensors, theirs: Tensors, relative: float, absolute: float
) -> None:
    """Each tensor's difference may be `relative` of its norm (at least of its share of all), plus `absolute`."""
    total = norm(theirs)
    numel = sum(t.numel() for t in theirs.values())
    for name in backward_order(theirs):
        expected, difference = theirs[name].double(), ours[name].double() - theirs[name].double()
        own = square_sum(expected) ** 0.5
        scale = max(own, total * (expected.numel() / numel) ** 0.5, 1e-300)
        error, bound = square_sum(difference) ** 0.5 / scale, relative + absolute / scale
        index = () if error <= bound else worst_index(difference)
        result.add(step, what, name, error=error, bound=bound, index=index)


def worst_index(difference: torch.Tensor) -> tuple[int, ...]:
    """Where the largest error is; the first NaN counts as largest."""
    flat = difference.abs().nan_to_num(nan=math.inf, posinf=math.inf).reshape(-1)
    return tuple(int(i) for i in torch.unravel_index(flat.argmax(), difference.shape))


def _minus(a: Tensors, b: Tensors) -> Tensors:
    return {name: value - b[name] for name, value in a.items()}


def _names_fault(record: Record, reference: Record) -> list[str]:
    missing, extra = set(reference.initial) - set(record.initial), set(record.initial) - set(reference.initial)
    found = [f"{len(missing)} tensors are on no rank: {_some(missing)}"] if missing else []
    return found + ([f"{len(extra)} tensors are not part of the model: {_some(extra)}"] if extra else [])


def _some(names: set[str]) -> str:
    ordered = backward_order(names)[::-1]
    return ", ".join(ordered[:4]) + (", ..." if len(ordered) > 4 else "")


def _scalars_fault(reports: Sequence[RankReport]) -> list[str]:
    """Losses, norms and counts come out of reductions over all ranks, so they are the same bits everywhere."""
    for step, values in enumerate(zip(*(report.scalars for report in reports), strict=True)):
        for name in values[0]:
            got = {value[name] for value in values}
            if len(got) > 1 and not all(math.isnan(value) for value in got):
                per_rank = ", ".join(f"{who(r)} {v[name]!r}" for r, v in zip(reports, values, strict=True))
                return [f"ranks disagree on the {name.replace('_', ' ')} of step {step + 1}: {per_rank}"]
    return []


def who(report: RankReport) -> str:
    """rank 3 (pp 1, tp 1)."""
    return f"rank {report.rank}" + (f" ({report.place})" if report.place else "")


def holders(difference: Difference, reports: Sequence[RankReport]) -> list[RankReport]:
    """The ranks whose shard holds the worst element."""
    return [report for report in reports if any(_holds(h, difference) for h in report.holdings)]


def _holds(holding: tuple, difference: Difference) -> bool:
    name, start, shape, offset, length = holding
    inside = [i - s for i, s in zip(difference.index, start, strict=False)]
    if name != difference.name or not all(0 <= i < n for i, n in zip(inside, shape, strict=True)):
        return False
    position = 0
    for i, n in zip(inside, shape, strict=True):
        position = position * n + i
    return offset <= position < offset + length


def place_of(name: str, config: Config) -> str:
    """layer 3, stage 1; or the link and its stage."""
    words = name.split(".")
    if words[0] == "layers":
        layer = int(words[1])
        stage = next(i for i, (begin, end) in enumerate(config.stage_layers) if begin <= layer < end)
        return f"layer {layer}, stage {stage}"
    return f"embedding, stage 0{_tied(config)}" if words[0] == "embedding" else f"head, stage {config.num_stages - 1}"


def _tied(config: Config) -> str:
    return f" (tied to the head, stage {config.num_stages - 1})" if config.model.tie_embeddings else ""


def backward_order(names) -> list[str]:
    """Names as backward comes to them: head, last layer ... first layer, embedding."""
    return sorted(names, key=lambda name: tuple(_order(name)))


def _order(name: str) -> Iterator[int | str]:
    words = name.split(".")
    yield {"head": 0, "final_norm": 1, "layers": 2, "embedding": 3}[words[0]]
    if words[0] == "layers":
        yield -int(words[1])
        inner = ".".join(words[2:])
        yield next(i for i, prefix in enumerate(WITHIN) if inner.startswith(f"{prefix}."))
    else:
        yield 0
        yield 0
    yield name
