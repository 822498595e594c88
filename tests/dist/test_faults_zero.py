"""Faults of flat shards: parameters of one, three and no elements on four ranks, most of whose shards are padding.

The manager and the optimizer run without a model: gradients are written by hand, as a backward would.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megalite.checkpoint.load import load
from megalite.checkpoint.save import save
from megalite.comm.collectives import Work
from megalite.config.schema import Optimizer
from megalite.mesh import Sizes
from megalite.optim.norm import clip_factor, counted, local_square_sum
from megalite.optim.optimizer import ShardOptimizer
from megalite.parallel.spec import ParamSpec, Part
from megalite.parallel.zero.manager import LinkUnits, ZeroManager, ZeroPolicy
from megalite.parallel.zero.unit import Place
from tests.dist.pool import mesh_for, run_ranks

WORLD = 4
ORDERS = {"empty inside": (1, 3, 0, 7), "empty first": (0, 1, 3, 7), "empty last": (1, 3, 7, 0), "one": (1,)}
CLIP = 0.1


def initial(numel: int) -> Tensor:
    return torch.linspace(-1.0, 2.0, numel, dtype=torch.float64) if numel else torch.empty(0, dtype=torch.float64)


def gradient(numel: int, *, step: int, rank: int, mb: int) -> Tensor:
    return torch.sin(torch.arange(numel, dtype=torch.float64) + 10 * step + 3 * rank + mb)


def name_of(numel: int) -> str:
    return f"p{numel}.weight"


def make_manager(mesh, sizes: tuple[int, ...], stage: int) -> tuple[ZeroManager, nn.Module]:
    """One unit that holds vectors of the given sizes."""
    module, entries = nn.Module(), []
    for numel in sizes:
        param = nn.Parameter(torch.empty(numel, device="meta"))
        param.spec = ParamSpec((Part(name_of(numel), (numel,), (0,), (numel,)),), "linear")
        entries.append((name_of(numel), param, [Place(module, f"p{numel}")]))
    policy = ZeroPolicy(stage, stage >= 2, torch.float64, torch.float64, torch.float64)
    return ZeroManager({"unit": entries}, policy, mesh, lambda spec, shape: initial(shape[0])), module


def train(rank: int, world: int, sizes: tuple[int, ...], stage: int, root: Path) -> dict[str, Tensor]:
    """Three steps of two microbatches; save, load into a second manager, and return what its module reads."""
    mesh = mesh_for(Sizes(dp_shard=world))
    zero, module = make_manager(mesh, sizes, stage)
    optimizer = ShardOptimizer(zero, Optimizer(weight_decay=0.5, clip_norm=CLIP))
    link = LinkUnits(("unit",), ("unit",))
    norms = []
    for step in range(3):
        zero.begin_step()
        for mb in range(2):
            zero.before(link, None, grads=True)
            for numel in sizes:
                getattr(module, f"p{numel}").main_grad.add_(gradient(numel, step=step, rank=rank, mb=mb))
            if stage >= 2 or mb == 1:
                zero.reduce(link)
            zero.after(link, None)
        zero.finish_grads()
        total = local_square_sum(zero)
        if world > 1:
            torch.distributed.all_reduce(total, group=mesh.world.pg)
        norms.append(total.sqrt().item())
        optimizer.update(0.1, scale=clip_factor(norms[-1], CLIP))
        zero.updated()
    path = save(root, 3, optimizer.pieces(counted), group=mesh.world, owner=zero.owns_replica, meta={})
    second, again = make_manager(mesh, sizes, stage)
    restored = ShardOptimizer(second, Optimizer(weight_decay=0.5))
    load(path, restored.pieces(), group=mesh.world)
    second.updated()
    for kind, tensors in optimizer.state.items():
        assert all(torch.equal(restored.state[kind][name], tensor) for name, tensor in tensors.items())
    second.before(link, None, grads=False)
    return {name_of(n): getattr(again, f"p{n}").detach().clone() for n in sizes} | {"norms": torch.tensor(norms)}


def plain_torch(sizes: tuple[int, ...]) -> dict[str, Tensor]:
    """The same by torch's AdamW and clip on whole tensors."""
    params = [nn.Parameter(initial(numel)) for numel in sizes]
    optimizer = torch.optim.AdamW(params, lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.5)
    norms = []
    for step in range(3):
        for param in params:
            grads = [gradient(param.numel(), step=step, rank=r, mb=mb) for r in range(WORLD) for mb in range(2)]
            param.grad = torch.stack(grads).sum(0)
        norms.append(torch.nn.utils.clip_grad_norm_(params, CLIP).item())
        optimizer.step()
    return {name_of(p.numel()): p.detach() for p in params} | {"norms": torch.tensor(norms)}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("order", ORDERS)
def test_fewer_elements_than_ranks(tmp_path, order, stage):
    """Z04, Z02, Z06, Z11, O03: three steps, clip, save and load equal torch's AdamW on whole tensors, whichever ranks
    hold nothing but padding."""
    sizes = ORDERS[order]
    expected = plain_torch(sizes)
    for found in run_ranks(WORLD, train, sizes, stage, tmp_path):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)


class Late:
    """A gather whose result arrives when it is waited for, or else with `arrive`; then it is long out of date."""

    def __init__(self, output: Tensor, work: Work):
        work.wait()
        self.output, self.values = output, output.clone()

    def wait(self) -> None:
        if self.values is not None:
            self.output.copy_(self.values)
            self.values = None

    arrive = wait


def write_twice(rank: int, world: int, stage: int, how: str) -> tuple[Tensor, Tensor]:
    """New main params with no forward since the last ones, whose gather is still under way."""
    zero, module = make_manager(mesh_for(Sizes(dp_shard=world)), (48,), stage)
    unit, optimizer = zero.units["unit"], ShardOptimizer(zero, Optimizer(name="sgd", weight_decay=0.0))
    zero.updated()
    late = unit._work = Late(unit.full, unit._work)
    before = unit.main.clone()
    if how == "update":
        unit.grad.fill_(1.0)
        optimizer.update(1.0)
    else:
        for piece in optimizer.pieces()["main"]:
            piece.data.sub_(1.0)
    zero.updated()
    late.arrive()
    zero.before(LinkUnits(("unit",), ("unit",)), None, grads=False)
    return unit.main - before, module.p48.detach() - initial(48)


@pytest.mark.parametrize("how", ["update", "load"])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_late_gather_brings_no_former_values_back(stage, how):
    """Z07, Z08: at stages 1 and 2 a gather writes into the tensor that the optimizer and a load write as well."""
    for main, found in run_ranks(2, write_twice, stage, how):
        torch.testing.assert_close(main, torch.full_like(main, -1.0))
        torch.testing.assert_close(found, torch.full_like(found, -1.0))
