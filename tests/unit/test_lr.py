"""The learning rate: values by hand, resume, ends, and a changed number of steps."""

from itertools import pairwise
from math import cos, pi

import pytest
import torch

from megalite.config.schema import Lr
from megalite.optim.lr import check_resume, learning_rate


def rates(steps: int, total: int, **keys) -> list[float]:
    lr = Lr(**{"peak": 1.0, "min_ratio": 0.1, **keys})
    return [learning_rate(lr, step, total) for step in range(1, steps + 1)]


def test_warmup_is_linear_and_reaches_the_peak():
    assert rates(5, 100, warmup_steps=4, schedule="constant") == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates(1, 100, warmup_steps=0, schedule="constant") == [1.0]
    for schedule in ("linear", "cosine", "wsd"):
        assert rates(4, 100, warmup_steps=4, schedule=schedule) == [0.25, 0.5, 0.75, 1.0]


def test_linear():
    assert rates(7, 6, warmup_steps=2, schedule="linear", min_ratio=0.2) == pytest.approx(
        [0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2], abs=1e-15
    )


def test_cosine_equals_its_formula_and_torch():
    got = rates(12, 10, schedule="cosine", peak=3e-4)
    want = [3e-4 * (0.1 + 0.9 * 0.5 * (1 + cos(pi * step / 10))) for step in range(1, 11)] + [3e-5, 3e-5]
    assert got == pytest.approx(want, rel=1e-14)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10, eta_min=3e-5)
    for rate in got[:10]:
        optimizer.step()
        theirs.step()
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)


def test_wsd():
    got = rates(12, 10, schedule="wsd", warmup_steps=2, decay_steps=4, min_ratio=0.0)
    assert got == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0, 0], abs=1e-15)
    assert rates(100, 100, schedule="wsd")[88:92] == pytest.approx([1, 1, 0.91, 0.82])  # default: the last tenth


def test_decay_steps_ends_linear_and_cosine_early():
    for schedule in ("linear", "cosine"):
        assert rates(9, 100, schedule=schedule, decay_steps=5)[4:] == pytest.approx([0.1] * 5)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, 9, 10, 20])
def test_never_outside_its_bounds_and_never_up_after_the_warmup(schedule, warmup):
    """C18: progress is clamped, also when the warm-up is as long as the run or longer."""
    got = rates(60, 10, schedule=schedule, warmup_steps=warmup)
    after = got[warmup:]
    assert all(0.1 - 1e-12 <= rate <= 1.0 for rate in after)
    assert all(a >= b for a, b in pairwise(after))
    assert got[-1] == pytest.approx(0.1)
    if warmup <= 9:
        assert got[9] == pytest.approx(0.1)


def test_resume_needs_no_state():
    """C01, O07: the rate is a function of the step number alone; skipped steps count as steps."""
    lr = Lr(peak=1.0, schedule="cosine")
    whole = [learning_rate(lr, step, 10) for step in range(1, 11)]
    resumed = [learning_rate(Lr.model_validate(lr.model_dump()), step, 10) for step in range(5, 11)]
    assert resumed == whole[4:]
    with pytest.raises(AssertionError, match="count from 1"):
        learning_rate(lr, 0, 10)


def test_a_changed_number_of_steps_is_refused_unless_asked_for():
    """C18: longer runs would raise the rate on resume."""
    lr = Lr(peak=1.0, schedule="cosine", min_ratio=0.1)
    with pytest.raises(ValueError, match=r"run\.steps=400 differs from the saved run's 200.*decay_steps=200 to keep"):
        check_resume(lr, lr, step=150, saved_steps=200, steps=400)
    kept = lr.model_copy(update={"decay_steps": 200})
    check_resume(lr, kept, step=150, saved_steps=200, steps=400)
    assert learning_rate(kept, 151, 400) == learning_rate(lr, 151, 200)
    check_resume(lr, lr, step=150, saved_steps=200, steps=200)
    constant = Lr(peak=1.0, schedule="constant")
    check_resume(constant, constant, step=150, saved_steps=200, steps=400)
    wsd = Lr(peak=1.0, schedule="wsd", decay_steps=20)
    check_resume(wsd, wsd, step=150, saved_steps=200, steps=400)  # before the decay nothing jumps
    with pytest.raises(ValueError, match="resume from before the decay"):
        check_resume(wsd, wsd, step=190, saved_steps=200, steps=400)
