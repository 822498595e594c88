"""The end of a run closes the overlap backends: a failure that only then comes to light is an error, before anything is
saved, and never in the place of an earlier error."""

from dataclasses import replace

import pytest
import torch

from megalite.comm.symmetric import virtual_heaps
from megalite.config.load import check
from megalite.mesh import single_device_mesh
from megalite.parallel.tp.overlap.choose import Choice, Choices
from megalite.parallel.tp.overlap.symm import SymmOverlap
from megalite.train import loop
from megalite.train.build import Trainer, build
from megalite.train.loop import Loaders, run_loop
from megalite.train.signals import StopFlag
from tests.dist.layouts import BASE, with_overrides
from tests.unit.test_verify_replicas import Batches


class Backend:
    """An overlap backend that is only closed."""

    name = "fake"

    def __init__(self, events: list[str], problem: str = ""):
        self.events, self.problem = events, problem

    def close(self) -> None:
        """Take a note, or fail."""
        self.events.append("close")
        if self.problem:
            raise RuntimeError(self.problem)


def make_trainer(backend: Backend, path) -> Trainer:
    """One rank's trainer of two blocks, each pass of whose linears has the backend."""
    settings = with_overrides(BASE, f"model.num_layers=2 run.dir={path} run.eval_batches=1")
    trainer = build(check(settings, {}, name="close"), single_device_mesh())
    sites = ("mlp.down.forward", "mlp.down.backward")
    choices = Choices({site: Choice(site, backend, "configured") for site in sites})
    for link in trainer.stages[0].links:
        link.context = replace(link.context, overlap=choices)
    return trainer


@pytest.fixture
def events(monkeypatch) -> list[str]:
    """What the loop does, in order."""
    noted: list[str] = []
    for name in ("train_step", "evaluate", "save_state"):
        original = getattr(loop, name)

        def call(*args, name=name, original=original, **kwargs):
            noted.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(loop, name, call)
    return noted


def run(trainer: Trainer, stop: StopFlag) -> bool:
    batches = Batches(trainer.config)
    return run_loop(trainer, Loaders(batches, batches), None, start=0, stop=stop)


def saved(path) -> list:
    return list(path.glob("checkpoints/step_*"))


def test_backends_are_closed_once_behind_the_last_step_and_before_its_save(events, tmp_path):
    assert run(make_trainer(Backend(events), tmp_path), StopFlag())
    assert events == ["train_step"] * 3 + ["evaluate", "close", "save_state"]


def test_a_stop_is_a_last_step_too(events, tmp_path):
    stop = StopFlag()
    stop.requested = True
    assert not run(make_trainer(Backend(events), tmp_path), stop)
    assert events == ["train_step", "evaluate", "close", "save_state"]


def test_a_wait_of_the_last_step_that_gave_up_is_an_error_and_nothing_is_saved(events, tmp_path):
    with pytest.raises(RuntimeError, match="rank 1 waited"):
        run(make_trainer(Backend(events, "rank 1 waited about 30 s"), tmp_path), StopFlag())
    assert events[-1] == "close"
    assert saved(tmp_path) == []


def test_an_earlier_error_stays_the_error(events, tmp_path, monkeypatch):
    def fails(*args, **kwargs):
        raise OSError("the disk is gone")

    trainer = make_trainer(Backend(events, "rank 1 waited about 30 s"), tmp_path)
    monkeypatch.setattr(loop, "evaluate", fails)
    with pytest.raises(OSError, match="the disk is gone") as error:
        run(trainer, StopFlag())
    assert error.value.__context__ is None
    assert "close" not in events


def test_symm_tells_at_its_close_of_a_wait_that_gave_up():
    cpu = torch.device("cpu")
    overlap = SymmOverlap(virtual_heaps(2, device=cpu)[0], ranks=(4, 6), timeout_s=2)
    overlap.close()
    overlap.setting.failures.errors.copy_(torch.tensor([1, 0, 1, 0, 5, 4]))
    overlap.setting.failures.copy()
    with pytest.raises(RuntimeError, match="rank 4 waited about 2 s for .* of rank 6: expected call 5, found 4"):
        overlap.close()
