"""What `symm` decides and says on the host: grids, where it can run, and the text of a wait that gave up."""

import pytest
import torch

from megalite.kernels.gemm_plan import GATHER, INTERPRETED, PULLING, REDUCE, WIDE, plan_grid, tile_for
from megalite.kernels.signals import DONE, READY, RESULT, Failures, spin_limit
from megalite.kernels.signals import triton_impl as signals
from megalite.mesh import Group
from megalite.parallel.tp.overlap import symm
from tests.kernels.triton_tools import CPU

CUDA = torch.device("cuda")


@pytest.mark.parametrize("tile", [*GATHER.values(), *REDUCE.values(), WIDE])
@pytest.mark.parametrize("processors", [108, 132])
@pytest.mark.parametrize("share", [1, 2, 4])
@pytest.mark.parametrize("pulling", [0, PULLING["cuda"]])
def test_grids_are_resident_and_leave_a_processor(tile, processors, share, pulling):
    grid = plan_grid(10_000, processors=processors, tile=tile, pulling=pulling, share=share)
    taken = -(-grid.multiplying // tile.per_processor) + grid.pulling
    assert taken * share + share <= processors
    assert (taken + 2) * share > processors - share, "it uses what it may"
    assert grid.programs == grid.multiplying + pulling


def test_small_grids_and_small_devices():
    assert plan_grid(3, processors=132, tile=WIDE).multiplying == 3
    assert plan_grid(0, processors=132, tile=WIDE).multiplying == 1
    assert plan_grid(9, processors=18, tile=INTERPRETED, pulling=16).multiplying == 1
    with pytest.raises(ValueError, match=r"17 processors for 1 ranks leave none .* use overlap\.backend=none"):
        plan_grid(9, processors=17, tile=INTERPRETED, pulling=16)


def test_tiles_of_wide_numbers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert tile_for(REDUCE, torch.bfloat16, CUDA) is REDUCE["sm_90"]
    assert tile_for(REDUCE, torch.float32, CUDA) is WIDE
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert tile_for(GATHER, torch.float16, CUDA) is GATHER["sm_80"]
    assert tile_for(GATHER, torch.float64, CPU) is INTERPRETED


def test_columns_are_the_same_in_kernels():
    assert [c.value for c in (signals.READY, signals.DONE, signals.RESULT)] == [READY, DONE, RESULT]


def test_a_wait_that_gave_up_is_told_with_global_ranks():
    failures = Failures(CPU, ranks=(4, 6, 8), timeout_s=30)
    failures.copy()
    failures.check()
    failures.errors.copy_(torch.tensor([1, 2, 0, RESULT, -5, -7]))
    failures.check()  # as last copied
    failures.copy()
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match="rank 8 waited about 30 s for RESULT of rank 4: expected call -5, found -7"
        ):
            failures.check()


def test_spins_are_bounded():
    assert spin_limit(1e9, CUDA) == (1 << 31) - 1
    assert spin_limit(0.0, CPU) == 1


@pytest.mark.parametrize(
    ("device", "dtype", "broken", "text"),
    [
        (CPU, torch.float32, {}, None),
        (CPU, torch.float64, {}, None),
        (CPU, torch.bfloat16, {}, "silently wrong in bfloat16"),
        (CPU, torch.float32, {"interpreting": lambda: False}, "TRITON_INTERPRET=1"),
        (CPU, torch.float32, {"triton_missing": lambda: "Triton is not installed"}, "Triton is not installed"),
        (CPU, torch.float32, {"shm_missing": lambda device: "no /dev/shm"}, "no /dev/shm"),
        (CUDA, torch.float64, {}, "float64"),
        (CUDA, torch.bfloat16, {"symmetric_missing": lambda device: "no NVLink"}, "no NVLink"),
    ],
)
def test_where_it_runs(monkeypatch, device, dtype, broken, text):
    for name, value in broken.items():
        monkeypatch.setattr(symm, name, value)
    reason = symm.symm_missing(device, dtype)
    assert (reason is None) if text is None else (text in reason)
    if text is not None:
        with pytest.raises(ValueError, match=r"overlap\.backend=symm is not possible: .*; use overlap\.backend=auto"):
            symm.open_symm(Group("tp"), device=device, dtype=dtype, timeout_s=1)
