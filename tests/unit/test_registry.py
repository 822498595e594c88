"""Selection of kernels: what auto takes and why, explicit choices, kernels from outside; that the model uses them."""

import importlib
import logging
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

from megalite import native
from megalite.cli import main
from megalite.config.rules import problems
from megalite.config.schema import Config, Kernels
from megalite.kernels import registry
from megalite.kernels.catalog import ALL_OPS
from megalite.kernels.check import check_op
from megalite.kernels.registry import NAMES, OPS, SELECTED, available, load, required, select
from megalite.mesh import single_device_mesh
from megalite.observe.log import get_logger
from tests.unit.model_tools import GPT, LLAMA, make_batch, make_config, make_stages, run, set_main_grads

CPU, GPU = torch.device("cpu"), torch.device("cuda")
NATIVE = ("rmsnorm", "attention", "rope", "swiglu")
"""Ops of a model that have a C++ kernel for the CPU."""


@pytest.fixture
def compiled_only(monkeypatch):
    """As in a normal process, also when another test has switched Triton's interpreter on."""
    monkeypatch.setattr(registry, "interpreting", lambda: False)


def names(selection):
    return {op: choice.name for op, choice in selection.choices.items()}


@pytest.fixture
def extension():
    if native.load() is None:
        pytest.skip(f"not built: {native.why_missing()}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_auto_on_cpu_is_native_where_there_is_one(compiled_only, extension, dtype):
    selection = select(Kernels(), CPU, dtype)
    table = selection.table().splitlines()
    assert table[0] == f"native: {', '.join(NATIVE)} (auto)"
    others = ", ".join(op for op in SELECTED if op not in NATIVE)
    assert table[1:] == [f"reference: {others} (auto: the device is cpu)"]
    assert selection["rope"].__name__ == "megalite.kernels.rope.native_impl"


def test_auto_without_the_extension_says_so(compiled_only, monkeypatch):
    monkeypatch.setattr(native, "_import", lambda: (None, "no such file"))
    selection = select(Kernels(), CPU, torch.float32)
    assert set(names(selection).values()) == {"reference"}
    first, second = selection.table().splitlines()
    assert first.startswith(f"reference: {', '.join(NATIVE)} (auto; the extension is missing: no such file")
    assert second.endswith("(auto: the device is cpu)")
    with pytest.raises(ValueError, match="kernels.rope=native can't be met: the extension is missing: no such file"):
        select(Kernels(rope="native"), CPU, torch.float32)


def test_attention_without_vector_instructions_is_torch_s(extension, monkeypatch):
    monkeypatch.setattr(native, "load", lambda: SimpleNamespace(simd_level=lambda: 0))
    found = select(Kernels(), CPU, torch.float32)
    assert (names(found)["attention"], names(found)["rmsnorm"]) == ("reference", "native")
    assert "slower than torch's on a CPU without AVX2" in found.choices["attention"].why


def test_native_is_for_the_cpu_and_not_for_fp64(extension):
    assert names(select(Kernels(rope="native"), CPU, torch.float32))["rope"] == "native"
    with pytest.raises(ValueError, match="run on the CPU, and the device is cuda"):
        select(Kernels(rope="native"), GPU, torch.float32)
    with pytest.raises(ValueError, match="take fp32 and bf16, and precision.compute is fp64; use auto or reference"):
        select(Kernels(rope="native"), CPU, torch.float64)
    with pytest.raises(ValueError, match="gelu has no native implementation; use auto or reference"):
        select(Kernels(gelu="native"), CPU, torch.float32)
    selection = select(Kernels(), CPU, torch.float64)
    assert set(names(selection).values()) == {"reference"}
    assert "precision.compute is fp64" in selection.choices["rope"].why


def test_auto_on_a_gpu_is_triton_but_for_what_torch_has(compiled_only):
    selection = select(Kernels(), GPU, torch.bfloat16)
    found = names(selection)
    assert {found.pop("wgrad"), found.pop("attention")} == {"reference"}
    assert set(found.values()) == {"triton"}
    assert "scaled_dot_product_attention is fused" in selection.choices["attention"].why


def test_one_op_rotates(extension):
    """A kernel for rope that is asked for is used: then attention is not one that rotates by itself."""
    selection = select(Kernels(rope="reference"), CPU, torch.float32)
    assert names(selection)["attention"] == "reference"
    assert "native rotates q and k by itself, and kernels.rope=reference shall" in selection.choices["attention"].why
    assert names(select(Kernels(attention="native"), CPU, torch.float32))["attention"] == "native"
    with pytest.raises(ValueError, match="kernels.rope=native has no effect with kernels.attention=native, which rot"):
        select(Kernels(rope="native", attention="native"), CPU, torch.float32)
    found = names(select(Kernels(rope="native", attention="reference"), CPU, torch.float32))
    assert (found["rope"], found["attention"]) == ("native", "reference")


def test_auto_in_fp64_is_the_reference_and_says_so(compiled_only):
    selection = select(Kernels(), GPU, torch.float64)
    assert set(names(selection).values()) == {"reference"}
    assert "precision.compute is fp64" in selection.choices["rmsnorm"].why


def test_auto_without_triton_says_what_to_install(monkeypatch):
    monkeypatch.setattr(registry, "triton_missing", lambda: "Triton is not installed (pip install 'triton>=3.6')")
    load.cache_clear()
    selection = select(Kernels(), GPU, torch.bfloat16)
    load.cache_clear()
    assert set(names(selection).values()) == {"reference"}
    assert "pip install 'triton>=3.6'" in selection.choices["rope"].why


@pytest.mark.parametrize(
    ("version", "missing"), [("3.5.1", "3.5.1 is too old"), ("3.6.0", ""), ("3.10.0+git1", ""), (None, "not installed")]
)
def test_triton_versions(monkeypatch, version, missing):
    fake = type(sys)("triton")
    fake.__version__ = version
    monkeypatch.setitem(sys.modules, "triton", fake if version else None)
    found = registry.triton_missing.__wrapped__()
    assert missing in found
    assert bool(missing) == bool(found)


def test_what_cannot_be_met_is_an_error_that_names_everything(compiled_only):
    with pytest.raises(ValueError, match="kernels.rmsnorm=triton") as caught:
        select(Kernels(rmsnorm="triton", rope="cuda"), CPU, torch.float32)
    text = str(caught.value)
    assert "kernels.rmsnorm=triton can't be met: triton kernels need a GPU" in text
    assert "kernels.rope=cuda can't be met: rope has no cuda implementation; use auto or reference" in text


def test_the_interpreter_is_an_explicit_choice(monkeypatch):
    monkeypatch.setattr(registry, "interpreting", lambda: True)
    assert "triton" not in names(select(Kernels(), CPU, torch.float32)).values()
    assert names(select(Kernels(rope="triton"), CPU, torch.float32))["rope"] == "triton"
    with pytest.raises(ValueError, match="silently wrong in bf16"):
        select(Kernels(rope="triton"), CPU, torch.bfloat16)


@pytest.mark.parametrize("op", OPS)
def test_every_implementation_offers_what_the_op_calls(op):
    assert required(op)
    for name in NAMES:
        module, reason = load(op, name)
        assert module is not None or reason
        assert name != "reference" or module is not None
        assert module is None or not [f for f in required(op) if not callable(getattr(module, f, None))]


@pytest.mark.parametrize("op", ALL_OPS)
def test_every_op_has_cases(op):
    outcome = check_op(op, load(op, "reference")[0], device=CPU, dtype=torch.float32)
    assert outcome.failures == []
    assert outcome.num_cases >= 4
    assert 0.0 < outcome.worst <= 1.0


OUTSIDE = """
    from megalite.kernels.swiglu import reference

    class Good:
        forward = staticmethod(reference.forward)
        backward = staticmethod(reference.backward)

    class Wrong(Good):
        @staticmethod
        def backward(dy, gate_up):
            return reference.backward(dy, gate_up) * 1.001

    class Breaks(Good):
        @staticmethod
        def forward(gate_up):
            raise RuntimeError("no such instruction")

    class NotFinite(Good):
        @staticmethod
        def forward(gate_up):
            return reference.forward(gate_up) * float("nan")

    class Half:
        forward = staticmethod(reference.forward)
"""


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """A module of the user's, importable as outside_kernels."""
    (tmp_path / "outside_kernels.py").write_text(textwrap.dedent(OUTSIDE))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "outside_kernels", raising=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_kernel_from_outside_is_taken(outside, dtype):
    choice = select(Kernels(swiglu="outside_kernels:Good"), CPU, dtype).choices["swiglu"]
    assert choice.name == "outside_kernels:Good"
    assert choice.module is importlib.import_module("outside_kernels").Good


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("outside_kernels:Wrong", "differs from the reference: case .*: error of gradient 0 is"),
        ("outside_kernels:Breaks", "RuntimeError: no such instruction"),
        ("outside_kernels:NotFinite", "error of output 0 is nan"),
        ("outside_kernels:Half", "lacks backward: it needs backward, forward as in"),
        ("outside_kernels:Nothing", "can't be imported: .*Nothing"),
        ("no_such_kernels:Good", "can't be imported: .*no_such_kernels"),
    ],
)
def test_a_wrong_kernel_from_outside_is_refused(outside, path, message):
    with pytest.raises(ValueError, match=message) as caught:
        select(Kernels(swiglu=path), CPU, torch.float32)
    assert str(caught.value).startswith(f"kernels.swiglu={path} ")
    assert "use kernels.swiglu=auto" in str(caught.value)


COUNTING = """
    import importlib
    from collections import Counter

    calls = Counter()

    class Counted:
        def __init__(self, op):
            self.op, self.reference = op, importlib.import_module(f"megalite.kernels.{op}.reference")

        def __getattr__(self, name):
            function = getattr(self.reference, name)
            def counted(*arguments, **named):
                calls[self.op, name] += 1
                return function(*arguments, **named)
            return counted

    rmsnorm, layernorm, rope, swiglu, gelu, linear_cross_entropy, wgrad, dropout = (
        Counted(op)
        for op in ("rmsnorm", "layernorm", "rope", "swiglu", "gelu", "linear_cross_entropy", "wgrad", "dropout")
    )
"""


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("model", "ops"),
    [
        (LLAMA, ["rmsnorm", "rope", "swiglu", "linear_cross_entropy", "wgrad"]),
        (GPT | {"dropout": 0.1}, ["layernorm", "gelu", "linear_cross_entropy", "wgrad", "dropout"]),
        (LLAMA | {"attention_dropout": 0.1}, ["dropout"]),
    ],
    ids=["llama", "gpt", "attention_dropout"],
)
def test_the_model_runs_what_was_selected(tmp_path, monkeypatch, model, ops, recompute):
    (tmp_path / "counting_kernels.py").write_text(textwrap.dedent(COUNTING))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "counting_kernels", raising=False)
    config = make_config(model, recompute=recompute, kernels={op: f"counting_kernels:{op}" for op in ops})
    assert problems(config) == []
    stages = make_stages(config, single_device_mesh())
    set_main_grads(stages, torch.float64)
    for stage in stages:
        stage.train()
    calls = importlib.import_module("counting_kernels").calls
    assert calls
    calls.clear()
    run(stages, make_batch(config), full_recompute=recompute == "full")
    backward = {op for op, name in calls if "backward" in name or name == "accumulate"}
    assert backward == set(ops)
    assert {op for op, _ in calls} == set(ops)


def test_the_head_s_weight_gradient_is_one_of_them(tmp_path, monkeypatch):
    """Four projections per block and the head."""
    (tmp_path / "counting_kernels.py").write_text(textwrap.dedent(COUNTING))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "counting_kernels", raising=False)
    config = make_config(LLAMA, kernels={"wgrad": "counting_kernels:wgrad"})
    stages = make_stages(config, single_device_mesh())
    set_main_grads(stages, torch.float64)
    calls = importlib.import_module("counting_kernels").calls
    calls.clear()
    run(stages, make_batch(config))
    assert calls == {("wgrad", "accumulate"): 4 * LLAMA["num_layers"] + 1}


def test_the_choice_is_logged_once():
    lines = []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    handler, logger, level = Keep(), get_logger(), get_logger().level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    make_stages(make_config(LLAMA), single_device_mesh())
    logger.removeHandler(handler)
    logger.setLevel(level)
    assert len([line for line in lines if line.startswith("kernels:\n  reference: rmsnorm")]) == 1


SMALL = {"family": "llama", "num_layers": 2, "hidden_size": 8, "num_heads": 2, "vocab_size": 9, "max_seq_len": 8}


def config_problems(**kernels):
    batch = {"global_batch_size": 1, "micro_batch_size": 1}
    return problems(Config.model_validate({"model": SMALL, "batch": batch, "kernels": kernels}))


def test_config_rules():
    assert config_problems(rmsnorm="triton", rope="a.b:c.d") == []
    (unknown,) = config_problems(rmsnorm="trition")
    assert "kernels.rmsnorm=trition must be auto, reference, native, triton, cuda or package.module:object" in unknown
    (unused,) = config_problems(layernorm="triton")
    assert "kernels.layernorm=triton has no effect with model.norm=rmsnorm" in unused
    for op in ("gelu", "dropout"):
        assert len(config_problems(**{op: "reference"})) == 1


def test_commands(capsys, compiled_only):
    assert main(["kernels", "list"]) == 0
    out = capsys.readouterr().out
    assert "gelu                  reference   ready      -          no (1)     -\n" in out
    if native.load() is not None:
        assert "rmsnorm               native      ready      ready      no (1)     -\n" in out
    assert "(1) triton kernels need a GPU" in out
    assert main(["kernels", "check", "swiglu", "--dtype", "fp32"]) == 0
    assert "ok   swiglu                reference  fp32" in capsys.readouterr().out
    assert main(["kernels", "check", "swigl"]) == 2
    assert "swigl is no op" in capsys.readouterr().err
    assert main(["kernels", "list", "--device", "tpu"]) == 2
    assert main(["kernels", "list", "--dtype", "int8"]) == 2


def test_check_fails_for_a_wrong_kernel(capsys, monkeypatch, compiled_only):
    reference = load("swiglu", "reference")[0]

    class Wrong:
        forward = staticmethod(lambda gate_up: reference.forward(gate_up) * 1.001)
        backward = staticmethod(reference.backward)

    def with_wrong(op, name, device, dtype):
        return (Wrong, "") if name == "triton" else available(op, name, device, dtype)

    monkeypatch.setattr("megalite.kernels.command.available", with_wrong)
    assert main(["kernels", "check", "swiglu", "--dtype", "fp32"]) == 1
    out = capsys.readouterr().out
    assert "FAIL swiglu                triton     fp32" in out
    assert "error of output 0 is" in out


@pytest.mark.parametrize("op", ALL_OPS)
def test_bench_runs_every_contestant(op, tmp_path, capsys, compiled_only):
    path = tmp_path / "rows.json"
    arguments = [
        "kernels",
        "bench",
        op,
        "--device",
        "cpu",
        "--tiny",
        "--no-compile",
        "--rounds",
        "1",
        "--json",
        str(path),
    ]
    assert main(arguments) == 0
    assert f"{op:21}" in capsys.readouterr().out
    assert '"reference"' in path.read_text()


def test_bench_leaves_out_foreign_software_that_fails(monkeypatch, capsys, compiled_only):
    def breaks(*_):
        raise RuntimeError("no compiler\nand a long text")

    monkeypatch.setattr("megalite.kernels.bench.baselines.compiled", lambda op: breaks)
    assert main(["kernels", "bench", "swiglu", "--device", "cpu", "--tiny", "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    assert "torch.compile" not in out
    assert "reference" in out
