"""Layouts in float32 whose ranks run the C++ kernels of layers train the oracle's weights, to 1e-5."""

import pytest

from megalite import native
from tests.dist.layouts import RECOMPUTE_LIST, SGD, Layout
from tests.dist.pool import run_ranks
from tests.dist.test_layouts import TOLERANCE, differences, oracle_run, run_layout

LAYERS = f"precision.compute=fp32 {SGD} kernels.rmsnorm=native kernels.swiglu=native"
NATIVE = f"{LAYERS} kernels.attention=native"
LAYOUTS = {
    "one-rank": Layout(NATIVE),
    "tp2-recompute-list": Layout(f"mesh.tp=2 {RECOMPUTE_LIST} {NATIVE}", "documents"),
    "tp2-rope": Layout(f"mesh.tp=2 {LAYERS} kernels.rope=native"),
    "pp2-tp2-kv1-tied": Layout(f"mesh.pp=2 mesh.tp=2 model.num_kv_heads=1 model.tie_embeddings=true {NATIVE}"),
}


class Counted:
    """The extension, counting calls of its functions."""

    def __init__(self, module):
        self.module, self.names = module, set()

    def __getattr__(self, name):
        self.names.add(name)
        return getattr(self.module, name)


def run_counted(rank, world, settings, masks):
    """As run_layout, and the names of the native functions that this rank called."""
    plain = native.load
    counted = Counted(plain())
    native.load = lambda: counted
    try:
        return run_layout(rank, world, settings, masks) | {"called": counted.names}
    finally:
        native.load = plain


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", LAYOUTS)
def test_native_layout_trains_as_one_device(name):
    if native.load() is None:
        pytest.skip(f"not built: {native.why_missing()}")
    layout = LAYOUTS[name]
    results = run_ranks(layout.world, run_counted, layout.settings, layout.masks)
    for result in results:
        mixer = "rope" if name == "tp2-rope" else "attention"
        assert {"rmsnorm", "rmsnorm_backward", "swiglu", mixer} <= result["called"]
        assert not {"rope", "attention"} - {mixer} & result["called"]
    actual = results[-1]
    found = differences(actual, oracle_run(layout, actual["initial"]), TOLERANCE["fp32"])
    assert not found, "\n".join(found[:12])
