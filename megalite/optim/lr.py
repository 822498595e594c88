"""The learning rate as a pure function of the step number, so that a resumed run can't be off by one.

Steps count from 1. A step whose update is skipped (non-finite gradients) still counts: the schedule is keyed by the
step, as is the data order, so ranks and resumed runs agree without any state. There is nothing to save.
"""

from math import cos, pi

from megalite.config.schema import Lr


def learning_rate(lr: Lr, step: int, total_steps: int) -> float:
    """Return the rate of update number `step`, 1-based, of a run of `total_steps`.

    Warm-up: step k of the first `warmup_steps` uses peak * k / warmup_steps. Then, from peak to peak * min_ratio:
    linear and cosine end at `decay_steps` (default total_steps); wsd stays at peak and decays linearly over the last
    `decay_steps` (default a tenth) of the run. After the end the rate stays at its minimum. constant stays at peak.
    """
    assert step >= 1, f"steps count from 1, got {step}"
    if step <= lr.warmup_steps:
        return lr.peak * step / lr.warmup_steps
    if lr.schedule == "constant":
        return lr.peak
    begin, end = _decay_span(lr, total_steps)
    progress = min(max((step - begin) / max(end - begin, 1), 0.0), 1.0)
    left = 0.5 * (1.0 + cos(pi * progress)) if lr.schedule == "cosine" else 1.0 - progress
    return lr.peak * (lr.min_ratio + (1.0 - lr.min_ratio) * left)


def _decay_span(lr: Lr, total_steps: int) -> tuple[int, int]:
    """Steps at which the decay begins and ends."""
    if lr.schedule == "wsd":
        length = lr.decay_steps or max(round(total_steps / 10), 1)
        return max(total_steps - length, lr.warmup_steps), total_steps
    return lr.warmup_steps, lr.decay_steps or total_steps


def check_resume(saved: Lr, new: Lr, *, step: int, saved_steps: int, steps: int) -> None:
    """Refuse a resume after `step` at which a changed run.steps alone would make the rate jump.

    A changed `lr` section is the user's explicit wish and passes.

    Raises:
        ValueError: with both rates and the setting that keeps the old schedule.
    """
    before, after = learning_rate(saved, step + 1, saved_steps), learning_rate(new, step + 1, steps)
    if saved != new or before == after:
        return
    way_out = f"set lr.decay_steps={saved_steps} to keep the saved schedule, or another to choose a new one"
    if saved.schedule == "wsd":
        way_out = "resume from before the decay, or set another lr.decay_steps (the decay ends at run.steps)"
    raise ValueError(
        f"run.steps={steps} differs from the saved run's {saved_steps} and would change the {new.schedule} schedule: "
        f"step {step + 1} would use {after:.6g} in place of {before:.6g}; {way_out}"
    )
