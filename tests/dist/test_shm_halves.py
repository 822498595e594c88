"""A column's backward over shared memory on real ranks: the weight gradient runs between the halves of dx's
reduce_scatter, with the bits of the blocking call; and what happens to a rank that dies there."""

import os
import re
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from megalite import native
from megalite.comm.attach import attach_channels
from megalite.comm.collectives import DONE, all_reduce, reduce_scatter
from megalite.config.schema import Comm
from megalite.mesh import Sizes
from megalite.parallel.tp.overlap import none
from megalite.parallel.tp.overlap.none import NO_OVERLAP
from megalite.parallel.tp.rows import TensorParallel, start_reduce_rows
from tests.dist.pool import RankError, mesh_for, run_ranks
from tests.dist.test_collectives import only_entry
from tests.dist.test_tp_layers import MODELS, train_rank
from tests.unit.model_tools import make_config
from tests.unit.test_shm_channel import in_rank_order

pytestmark = pytest.mark.skipif(native.load() is None, reason="needs the compiled extension")
ROWS, K, N = 1536, 256, 24
"""A rank's share of dx fills more than two chunks in fp32."""


def blocking(partial, tp, *, site, exclusive=False):
    """start_reduce_rows as a caller gets it that promises nothing."""
    return start_reduce_rows(partial, tp, site=site)


def inputs(rank: int, dtype: torch.dtype) -> list[Tensor]:
    """A rank's dy, weight and x."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in ((ROWS, N), (N, K), (ROWS, K))]


def backward(rank: int, world: int, dtype: torch.dtype) -> None:
    tp = TensorParallel(mesh_for(Sizes(tp=world)).tp, sequence_parallel=True)
    dy, weight, x = inputs(rank, dtype)
    how = {"tp": tp, "site": "here", "meanwhile": lambda: dy.t().mm(x)}
    found = [NO_OVERLAP.dgrad_reduce(dy, weight, **how) for _ in range(3)]
    with mock.patch.object(none, "start_reduce_rows", blocking):
        expected = NO_OVERLAP.dgrad_reduce(dy, weight, **how)
    partial = [theirs[0].mm(theirs[1]) for theirs in (inputs(r, dtype) for r in range(world))]
    assert torch.equal(expected[0], in_rank_order(partial).chunk(world)[rank])
    for pair in found:
        assert all(torch.equal(mine, truth) for mine, truth in zip(pair, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("world", [2, 4])
def test_a_columns_backward_has_the_bits_of_the_blocking_call(world, dtype):
    run_ranks(world, backward, dtype)


def train_blocking(rank: int, world: int, config):
    with mock.patch.object(none, "start_reduce_rows", blocking):
        return train_rank(rank, world, config)


@pytest.mark.parametrize("name", ["llama_one_kv_head", "gpt"])
def test_a_models_gradients_have_the_bits_of_the_blocking_call(name):
    config = make_config(MODELS[name], mesh={"tp": 4})
    for found, expected in zip(run_ranks(4, train_rank, config), run_ranks(4, train_blocking, config), strict=True):
        assert torch.equal(found[0], expected[0])
        for (part, mine), (_, truth) in zip(found[2], expected[2], strict=True):
            assert torch.equal(mine, truth), part.name


def late(rank: int, world: int, folder: Path) -> None:
    """The last rank comes when all others are in their weight gradients."""
    tp = TensorParallel(mesh_for(Sizes(tp=world)).tp, sequence_parallel=True)
    all_reduce(torch.zeros(1), tp.group)
    limit = time.monotonic() + 20
    while rank == world - 1 and len(list(folder.iterdir())) < world - 1:
        assert time.monotonic() < limit, "nobody came to the weight gradient"
        time.sleep(0.002)
    dy, weight = torch.full((ROWS, N), rank + 1.0), torch.ones(N, K)
    dx, _ = NO_OVERLAP.dgrad_reduce(dy, weight, tp=tp, site="here", meanwhile=(folder / str(rank)).touch)
    assert dx.unique().tolist() == [N * sum(range(1, world + 1))]


@pytest.mark.parametrize("world", [2, 3])
def test_the_weight_gradient_does_not_wait_for_the_other_ranks(world, tmp_path):
    run_ranks(world, late, tmp_path)


def promises(rank: int, world: int) -> None:
    mesh = mesh_for(Sizes(tp=world), cpu_backend="shm")
    group, full = mesh.tp, torch.arange(4.0 * world) + rank
    expected = (world * torch.arange(4.0 * world) + sum(range(world))).chunk(world)[rank]
    for how in ({"async_op": True}, {"exclusive": True}, {}):  # as without a promise, or without an asynchronous call
        out = torch.empty(4)
        assert reduce_scatter(out, full, group, **how) is DONE
        assert torch.equal(out, expected)
    mesh.ledger.reset()
    out = torch.full((4,), 77.0)
    work = reduce_scatter(out, full, group, site="here", async_op=True, exclusive=True)
    assert only_entry(mesh.ledger) == ("tp", "reduce_scatter", "here", (world - 1) * out.nbytes)
    assert not work.done
    assert out.eq(77).all()
    work.wait()
    work.wait()  # may be called again
    assert work.done
    assert torch.equal(out, expected)


def test_only_who_promises_to_wait_first_gets_it_in_halves():
    run_ranks(3, promises)


def fresh(world: int) -> TensorParallel:
    """With a channel of its own, which the test may break."""
    mesh = attach_channels(mesh_for(Sizes(tp=world), cpu_backend="gloo"), Comm(cpu_backend="shm"), timeout_s=30.0)
    return TensorParallel(mesh.tp, sequence_parallel=True)


def killed_in_between(rank: int, world: int, folder: Path) -> None:
    tp = fresh(world)
    all_reduce(torch.zeros(1), tp.group)
    end = (lambda: os.kill(os.getpid(), signal.SIGKILL)) if rank == 1 else (lambda: None)
    try:
        NO_OVERLAP.dgrad_reduce(torch.ones(ROWS, N), torch.ones(N, K), tp=tp, site="here", meanwhile=end)
    except RuntimeError as error:
        (folder / f"rank{rank}").write_text("\n".join([str(error), *error.__notes__]))
        raise


def test_a_rank_killed_in_its_weight_gradient_is_named_by_all_others(tmp_path):
    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(3, killed_in_between, tmp_path)
    for rank in (0, 2):
        text = (tmp_path / f"rank{rank}").read_text()
        seen = rf"rank 1 died \(pid \d+\); rank \d waited for it in reduce_scatter of {ROWS * K} x float32 over "
        assert re.search(f"^({seen}|rank {rank} can't do reduce_scatter.*out of step since: {seen})", text), text
        assert text.endswith("\nat call site here")


def refused_in_between(rank: int, world: int) -> list[str]:
    """What a call on the group from within the weight gradient ends with."""
    tp = fresh(world)
    dy, weight = torch.ones(ROWS, N), torch.ones(N, K)
    wrong = (lambda: all_reduce(torch.zeros(5), tp.group, site="wrong")) if rank == 1 else (lambda: None)
    with pytest.raises(RuntimeError) as raised:
        NO_OVERLAP.dgrad_reduce(dy, weight, tp=tp, site="here", meanwhile=wrong)
    return [str(raised.value), *raised.value.__notes__]


def test_a_call_within_the_weight_gradient_is_an_error_on_all_ranks():
    first, second, third = run_ranks(3, refused_in_between, timeout_s=20.0)
    text = "rank 1 calls all_reduce (sum) of 5 x float32 over ranks 0, 1, 2 before it has waited for its last"
    assert second == [f"{text} reduce_scatter", "at call site wrong"]
    for said in (first, third):
        assert f"the ranks are out of step since: {text}" in said[0]
        assert said[1] == "at call site here"
