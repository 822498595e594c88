"""bf16 moments: rounding at random without bias, equal in every layout, saved and loaded exactly."""

from math import prod

import pytest
import torch

from megalite.checkpoint.load import Reader
from megalite.config.load import check
from megalite.kernels.philox import fill_normal, stream_key
from megalite.kernels.philox.reference import words
from megalite.optim.norm import counted
from megalite.optim.rounding import round_stochastic, store_rounded
from megalite.parallel.spec import Part
from megalite.train.logical import gather_logical
from megalite.train.state import load_state, save_state
from tests.dist.fault_tools import make_trainer, settings_of
from tests.dist.layouts import SGD
from tests.dist.pool import run_ranks

BF16 = "precision.compute=bf16 precision.moments=bf16"


def drawn(num: int, stream: str) -> torch.Tensor:
    return words(torch.arange(num), stream_key(1, stream))[0]


def test_rounds_to_a_neighbour_and_the_mean_is_exact():
    values = torch.tensor([1.0 + 2**-10, -3.0 - 2**-9, 1e-39, 0.3, -7e30, 2**-130])
    num = 20000
    many = values.repeat_interleave(num)
    rounded = round_stochastic(many, drawn(many.numel(), "mean")).double().view(-1, num)
    for value, row in zip(values.double(), rounded, strict=True):
        low, high = row.min(), row.max()
        assert low <= value <= high
        assert len(row.unique()) <= 2
        assert abs(row.mean() - value) <= 4 * (high - low) / num**0.5


def test_what_bf16_holds_and_what_is_not_finite_stays():
    values = torch.tensor([0.0, -0.0, 1.0, -2.5, torch.inf, -torch.inf, 2.0**-133])
    for word in (0, 1, 0x7FFF, 0xFFFF, 0xFFFFFFFF):
        out = round_stochastic(values, torch.full((7,), word))
        assert torch.equal(out.view(torch.int16), values.bfloat16().view(torch.int16))
    assert round_stochastic(torch.tensor([torch.nan]), torch.tensor([0xFFFF])).isnan().all()


def test_no_drift_over_ten_thousand_steps():
    """An average of a constant, beta 0.999: at random it stays within a standard error, to nearest it stalls."""
    num, beta, target = 256, 0.999, 0.7
    average = torch.zeros(num, dtype=torch.bfloat16)
    nearest = average.clone()
    tail = torch.zeros((), dtype=torch.float64)
    for step in range(10_000):
        wide = average.float().mul_(beta).add_((1 - beta) * target)
        average = round_stochastic(wide, words(torch.arange(num), (step, 5))[0])
        nearest = nearest.float().mul_(beta).add_((1 - beta) * target).bfloat16()
        if step >= 8_000:
            tail += average.double().mean() / 2_000
    # one rounding's variance is at most (2^-8)^2 / 4 below 1; the average sums them with weights beta^2
    spread = 2**-9 / (1 - beta**2) ** 0.5
    assert abs(tail - target) < 4 * spread / num**0.5
    assert abs(average.double().mean() - target) < 4 * spread / num**0.5
    assert abs(nearest.double().mean() - target) > 0.1, "rounding to nearest should have stalled"


def test_runs_and_boxes_round_as_the_whole_tensor():
    shape, key = (6, 10), stream_key(3, "boxes")
    values = fill_normal(torch.empty(shape), stream_key(3, "values"), start=0, std=1.0)
    whole = torch.empty(60, dtype=torch.bfloat16)
    store_rounded(whole, values.view(-1), Part("t", shape, (0, 0), shape), 0, key=key)
    box = Part("t", shape, (2, 5), (3, 4))
    cut = values[2:5, 5:9].reshape(-1)
    out = torch.empty(7, dtype=torch.bfloat16)
    store_rounded(out, cut[3:10], box, 3, key=key)
    assert torch.equal(out, whole.view(shape)[2:5, 5:9].reshape(-1)[3:10])
    assert not torch.equal(whole, values.view(-1).bfloat16())


def state_after_updates(rank: int, world: int, overrides: str) -> dict[str, dict[str, torch.Tensor]]:
    """Two updates from gradients that are a function of the logical element, the same bits in every layout."""
    trainer = make_trainer(settings_of(overrides))
    for update in range(2):
        for piece in trainer.optimizer.grad_pieces():
            part = piece.part
            whole = fill_normal(torch.empty(part.global_shape), stream_key(9, part.name, update), start=0, std=0.1)
            box = whole[tuple(slice(s, s + n) for s, n in zip(part.start, part.shape, strict=True))]
            piece.data.copy_(box.reshape(-1)[piece.offset : piece.offset + piece.data.numel()])
        trainer.optimizer.update(0.01)
        trainer.zero.updated()
    return {kind: gather_logical(trainer, pieces) for kind, pieces in trainer.optimizer.pieces(counted).items()}


@pytest.mark.parametrize("optimizer", ["optimizer.implementation=reference", SGD])
def test_layouts_round_alike(optimizer):
    base = f"{BF16} {optimizer}"
    (one,) = run_ranks(1, state_after_updates, base)
    assert one["main"].keys() == one[min(one.keys() - {"main"})].keys()
    assert all(prod(value.shape) for value in one["main"].values())
    for layout in ("mesh.tp=2", "mesh.dp=2 zero.stage=3 zero.offload_optimizer=cpu"):
        for state in run_ranks(2, state_after_updates, f"{base} {layout}"):
            for kind, tensors in one.items():
                assert all(torch.equal(state[kind][name], value) for name, value in tensors.items()), (layout, kind)


def test_saved_as_bf16_and_loaded_exactly(tmp_path):
    overrides = f"{BF16} run.dir={tmp_path}"
    trainer = make_trainer(settings_of(overrides))
    for unit in trainer.zero.units.values():
        fill_normal(unit.grad, stream_key(4, unit.name), start=0, std=0.1)
    trainer.optimizer.update(0.01)
    trainer.zero.updated()
    path = save_state(trainer, 1)
    with Reader(path) as reader:
        assert reader.tensor("exp_avg", "final_norm.weight").dtype == torch.bfloat16
        assert reader.tensor("exp_avg_sq", "final_norm.weight").dtype == torch.bfloat16
        assert reader.tensor("main", "final_norm.weight").dtype == torch.float32
    again = make_trainer(settings_of(overrides))
    load_state(again, path)
    wide = make_trainer(settings_of(f"{overrides} precision.moments=fp32"))
    load_state(wide, path)
    for kind, tensors in trainer.optimizer.state.items():
        for piece, same, widened in zip(
            trainer.optimizer.pieces()[kind], again.optimizer.pieces()[kind], wide.optimizer.pieces()[kind], strict=True
        ):
            assert torch.equal(piece.data, same.data)
            assert torch.equal(piece.data.float(), widened.data)
        assert all(tensor.any() for tensor in tensors.values())


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ("precision.moments=bf16", "would round the moments of precision.compute=fp64"),
        (f"{BF16} optimizer.implementation=apex", "apex, which keeps fp32 moments"),
        (f"{BF16} {SGD} optimizer.momentum=0.0", "moments=bf16 has no effect with optimizer.name=sgd"),
    ],
)
def test_wrong_inputs(overrides, match):
    with pytest.raises(ValueError, match=match):
        check(settings_of(overrides), {}, name="x")
