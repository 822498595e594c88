"""When gradients leave for the host: under the backward, and never before their last change; told by events, not times.

Reductions are waited for as soon as somebody asks whether they are done, so that the order does not hang on the wire.
"""

import pytest
import torch

from megalite.comm import swap
from megalite.comm.collectives import Work
from megalite.optim.offload import HostUnits
from megalite.parallel.zero.hooks import StageHooks
from megalite.train.step import train_step
from tests.dist.fault_tools import make_trainer, settings_of
from tests.dist.layouts import ZBV, global_batch
from tests.dist.pool import run_ranks
from tests.dist.test_layouts import own_microbatches

OFFLOAD = "zero.offload_optimizer=cpu comm.cpu_backend=gloo"
RUNS = {
    1: ["", "precision.compute=bf16 zero.offload_main=true", 'model.frozen=["layers.2.*","*_norm.*"]'],
    2: [
        "mesh.dp=2 zero.stage=1",
        "mesh.dp=2 zero.stage=3 zero.reshard_after=forward zero.reduce_each=microbatch",
        "mesh.dp=2 zero.stage=2 precision.compute=bf16 precision.reduce=bf16",
        "mesh.dp=2 zero.stage=0",
        "mesh.tp=2",
        f"mesh.pp=2 {ZBV}",
        "mesh.pp=2 model.tie_embeddings=true",
    ],
    4: [
        "mesh.tp=4 batch.micro_batch_size=2",
        "mesh.dp.replicate=2 mesh.dp.shard=2 zero.stage=2",
        "mesh.dp=2 mesh.tp=2 zero.stage=2 comm.cpu_backend=shm",
        "mesh.dp.replicate=4 mesh.dp.shard=1 zero.stage=3 zero.reduce_each=microbatch",
    ],
}


def watched_step(rank, world, all_overrides, callback):
    """Per run, the events of one step, in order: (backward, unit), (taken, unit, elements), (finishing,); after checks
    that hold for all."""
    Work.done = property(lambda self: self.wait() is None)
    try:
        return [_watched(f"{OFFLOAD} {overrides}", callback) for overrides in all_overrides]
    finally:
        Work.done = DONE


def swapped_step(rank, world, overrides):
    """A step whose reductions go as messages, of which gloo never says that they are done."""
    large, swap.LARGE_BYTES = swap.LARGE_BYTES, 0
    try:
        events, numels = _watched(f"{overrides} {OFFLOAD}", False)
    finally:
        swap.LARGE_BYTES = large
    ready = {event[1] for event in events[: events.index(("finishing",))] if event[0] == "taken"}
    return ready, set(numels)


DONE = Work.done


def _watched(overrides, callback):
    trainer = make_trainer(settings_of(overrides))
    events = []
    if callback:
        trainer.zero.check_grads(lambda unit, name, grad: grad.mul_(0.5))

    def noted(owner, name, note):
        original = getattr(owner, name)

        def call(self, *args, **kwargs):
            events.append(note(self, *args))
            return original(self, *args, **kwargs)

        setattr(owner, name, call)
        return owner, name, original

    def backward(hooks, position):
        return "backward", hooks.links[position].reduces

    patches = [
        noted(StageHooks, "before_backward", backward),
        noted(StageHooks, "before_weights", backward),
        noted(HostUnits, "take", lambda _, unit, slices: ("taken", unit.name, sum(e - b for b, e in slices))),
        noted(HostUnits, "arriving", lambda host: _check_copies(host)),
        noted(type(trainer.zero), "finish_grads", lambda zero: ("finishing",)),
    ]
    try:
        batches = own_microbatches(
            trainer.config, trainer.mesh.dp.rank, global_batch(settings_of(overrides), "uneven", 0), 0
        )
        assert not train_step(trainer, batches, lr=0.01).skipped
    finally:
        for owner, name, original in patches:
            setattr(owner, name, original)
        trainer.zero.check_grads(None)
    return events, {name: unit.grad.numel() for name, unit in trainer.zero.units.items()}


def _check_copies(host):
    """At the update each element of every gradient has been copied exactly once, with its final value."""
    for name, unit in host.units.items():
        assert host.taken[name] == unit.grad.numel(), name
        assert unit.grad.abs().max() > 0 or name == "layers.2", name
        assert torch.equal(host.copies[name].grad, unit.grad), name
        assert host.main or torch.equal(host.copies[name].main, unit.main)
    return ("arriving",)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("world", RUNS)
def test_gradients_leave_under_the_backward_and_after_their_last_change(world):
    results = run_ranks(world, watched_step, RUNS[world], False, timeout_s=90)
    for overrides, *ranks in zip(RUNS[world], *results, strict=True):
        for events, numels in ranks:
            ready = {name: 0 for name in numels}
            for event in events[: events.index(("finishing",))]:
                if event[0] == "taken":
                    ready[event[1]] += event[2]
                elif event[0] == "backward":  # of an earlier link: nothing that has left is touched again
                    assert not any(ready[name] for name in event[1]), (overrides, event)
            at = {name: _index(events, "taken", name) for name in numels}
            last = {name: _index(events, "backward", name, last=True) for name in numels}
            if "replicate=2" in overrides:  # summed over replicas when all is reduced
                assert not any(ready.values())
                continue
            for name, numel in numels.items():
                late = ("tie_embeddings" in overrides and name == "tied") or (
                    "frozen" in overrides and name == "layers.2"
                )
                assert (ready[name] > 0) != late, (overrides, name)
                if "tp=" not in overrides and "frozen" not in overrides and not late:
                    assert ready[name] == numel
                if not late and "zbv" not in overrides:  # it left before any other unit's last backward began
                    later = [last[other] for other in numels if last[other] > last[name]]
                    assert last[name] < at[name] < min([*later, len(events)]), (overrides, name)
            if "tp=" in overrides and "dp" not in overrides:  # norms are summed over tp at the end
                assert all(ready[name] < numels[name] for name in numels if name.startswith("layers"))


def _index(events, kind, name, *, last=False):
    found = [i for i, event in enumerate(events) if event[0] == kind and (event[1] == name or name in event[1])]
    return found[-1 if last else 0]


@pytest.mark.timeout(60)
def test_a_gradient_check_sees_and_changes_all_before_it_leaves():
    for events, numels in run_ranks(2, watched_step, ["mesh.dp=2 zero.stage=2"], True, timeout_s=50)[0]:
        before = events[: events.index(("finishing",))]
        assert not any(event[0] == "taken" and event[2] for event in before)
        assert len([event for event in events if event[0] == "taken" and event[2]]) == len(numels)


@pytest.mark.timeout(60)
def test_reductions_of_which_nobody_knows_whether_they_are_done():
    """Their gradients leave in the end, with the right values; behind the first of them all others wait."""
    for ready, names in run_ranks(2, swapped_step, "mesh.dp=2 zero.stage=2 zero.reduce_each=step", timeout_s=50):
        assert not ready
        assert "layers.3" in names
