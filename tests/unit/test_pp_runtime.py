"""The runtime's own bookkeeping on one rank, over chunks that only take notes: gathers that are begun ahead of a run.
What ranks really execute: dist/test_trace_run.py."""

import pytest
import torch

from megalite.batch import Microbatch
from megalite.mesh import single_device_mesh
from megalite.parallel.pp.actions import parse_rows
from megalite.parallel.pp.lower import Lowered
from megalite.parallel.pp.runtime import PipelineRuntime, Wire
from megalite.parallel.pp.schedule import Schedule

ROW = "0GATHER,1GATHER,0F0,1F0,1B0,1REDUCE,1RESHARD,0B0,0REDUCE,0RESHARD,1GATHER,0GATHER,1RESHARD,0RESHARD"
BEGUN = ["0 gather", "1 gather"]
REST = [
    "0F0",
    "1F0",
    "1B0 last",
    "1 reshard",
    "0B0 last",
    "0 reshard",
    "1 gather",
    "0 gather",
    "1 reshard",
    "0 reshard",
]
EVENTS = BEGUN + REST


class Noting:
    """A chunk and its stage's actions, in one."""

    def __init__(self, stage: int, events: list[str]):
        self.stage, self.events = stage, events

    def gather(self, *, backward: bool) -> None:
        self.events.append(f"{self.stage} gather{' for backward' if backward else ''}")

    def reshard(self) -> None:
        self.events.append(f"{self.stage} reshard")

    def forward(self, mb, x, batch, *, train):
        self.events.append(f"{self.stage}F{mb}")
        return torch.ones(batch.rows)

    def backward(self, mb, grad, *, reduce):
        self.events.append(f"{self.stage}B{mb} {reduce}")
        return grad


def make_runtime(row: str) -> tuple[PipelineRuntime, list[str]]:
    events: list[str] = []
    actions = parse_rows(row)
    schedule = Schedule("made up", 1, 2, 1, (0, 0), actions)
    lowered = Lowered(schedule, actions, 3, "step", "step")
    stages = {stage: Noting(stage, events) for stage in (0, 1)}
    wire = Wire(lambda batch: (batch.rows,), torch.float32)
    return PipelineRuntime(lowered, stages, stages, mesh=single_device_mesh(), wire=wire), events


def one_batch() -> list[Microbatch]:
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    return [Microbatch(tokens, tokens)]


def test_the_first_gathers_are_begun_once_and_the_run_goes_on_behind_them():
    runtime, events = make_runtime(ROW)
    runtime.begin()
    assert events == BEGUN
    runtime.begin()
    assert events == BEGUN, "a second begin starts nothing again"
    assert [loss.item() for loss in runtime.run(one_batch())] == [3.0]
    assert events == EVENTS


def test_a_run_needs_no_begin_and_every_run_starts_anew():
    runtime, events = make_runtime(ROW)
    runtime.run(one_batch())
    assert events == EVENTS
    runtime.begin()
    runtime.run(one_batch())
    assert events == EVENTS * 2
    runtime.run(one_batch())
    assert events == EVENTS * 3


def test_a_gather_for_a_backward_is_begun_as_one():
    runtime, events = make_runtime("0GATHER,1GATHER,1B0,0B0")
    runtime.begin()
    assert events == ["0 gather for backward", "1 gather for backward"]


@pytest.mark.parametrize(
    ("row", "begun", "run"), [(ROW.removeprefix("0GATHER,1GATHER,"), [], REST), ("0GATHER,1GATHER", BEGUN, [])]
)
def test_rows_without_gathers_in_front_and_rows_of_nothing_else(row, begun, run):
    runtime, events = make_runtime(row)
    runtime.begin()
    assert events == begun
    runtime.run(one_batch())
    assert events == begun + run
