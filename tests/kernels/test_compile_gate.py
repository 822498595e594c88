"""The compile gate: it passes on the kernels as they are, and it reports what it is there to report.

It runs as a process of its own, since tests of the interpreter may have loaded triton in this one.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GATE = ROOT / "tools" / "compile_gate.py"


def python(*arguments, **options):
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=280, **options)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_kernels_pass():
    code, out = python(str(GATE))
    assert code == 0, out
    assert " 0 failed, 0 spills" in out
    assert "sm_80" in out
    assert "sm_90" in out


BAD = """
import sys
sys.path.insert(0, sys.argv[1])
import compile_gate as gate
import triton
import triton.language as tl
from megalite.kernels.compile_cases import CompileCase

@triton.jit
def double(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at) * 2)

@triton.jit
def product(a, b, c, K, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    rows, depth = tl.arange(0, BLOCK), tl.arange(0, DEPTH)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, DEPTH):
        left = tl.load(a + rows[:, None] * K + k + depth[None, :])
        right = tl.load(b + (k + depth)[:, None] * BLOCK + rows[None, :])
        total = tl.dot(left, right, total)
    tl.store(c + rows[:, None] * BLOCK + rows[None, :], total)

pointers = {"x": "*fp32", "y": "*fp32"}
gemm = {"a": "*bf16", "b": "*bf16", "c": "*fp32", "K": "i32"}
CASES = {
    "good": CompileCase(double, "good", pointers, {"BLOCK": 1024}, 4, attrs=("x", "y")),
    "spills": CompileCase(double, "spills", pointers, {"BLOCK": 16384}, 1, attrs=("x", "y")),
    "scalar": CompileCase(double, "scalar", pointers, {"BLOCK": 1024}, 4),
    "shared": CompileCase(product, "shared", gemm, {"BLOCK": 256, "DEPTH": 64}, 8, 6, attrs=("a", "b", "c", "K")),
    "wrong": CompileCase(double, "wrong", pointers | {"z": "i32"}, {"BLOCK": 1024}, 4),
}
for name, case in CASES.items():
    job = gate.Job(name, "sm_80", "module", "", 32 * case.num_warps, (r"LDG\\.E\\.128",) if name == "scalar" else ())
    try:
        cubin, shared = gate.compile_triton(case, "sm_80")
        result = gate.inspect(cubin, expect=job.expect, shared=shared)
    except Exception as error:
        result = gate.Result(error=str(error))
    print(name, "|", gate.faults(job, result))
"""


@pytest.mark.timeout(200)
def test_bad_kernels_are_reported(tmp_path):
    (tmp_path / "bad.py").write_text(BAD)
    code, out = python(str(tmp_path / "bad.py"), str(ROOT / "tools"))
    assert code == 0, out
    found = dict(line.split(" | ") for line in out.splitlines() if " | " in line)
    assert found["good"] == "[]"
    assert "spill instructions" in found["spills"]
    assert "lacks LDG" in found["scalar"]
    assert "bytes of shared memory, limit 166912" in found["shared"]
    assert "z are not arguments of double" in found["wrong"]


REGRESS = """
import sys
sys.path.insert(0, sys.argv[1])
import compile_gate as gate

tools = {"triton": "3.7.1", "nvcc": "13.0.88"}
baseline = {"tools": tools, "kernels": {"k": {"sm_80": {"registers": 40, "shared": 1024}}, "csrc/k.cu": {}, "lost": {}}}
job = gate.Job("k", "sm_80", "module", "", 128)

def found(registers, shared=1024, job=job, tools=tools):
    return gate.regressions(job, gate.Result(registers=registers, shared=shared), baseline, tools)

assert found(48) == [], "a little is the same"
assert found(49) == ["registers 40 -> 49"]
assert found(40, 4096) == ["shared 1024 -> 4096"]
assert found(99, tools=tools | {"triton": "3.8.0"}) == [], "another compiler"
assert "not in the baseline" in found(1, job=gate.Job("new", "sm_80", "module", ""))[0]
assert gate.gone([job], baseline, cuda=False) == ["lost"]
assert gate.gone([job], baseline, cuda=True) == ["csrc/k.cu", "lost"]
assert gate.faults(gate.Job("k", "sm_80", "module", "", 1024), gate.Result(registers=65)), "65 x 1024 registers"
assert gate.faults(job, gate.Result(registers=65)) == []
"""


def test_regressions_are_reported(tmp_path):
    (tmp_path / "regress.py").write_text(REGRESS)
    code, out = python(str(tmp_path / "regress.py"), str(ROOT / "tools"))
    assert code == 0, out


def test_the_baseline_holds_both_architectures():
    baseline = json.loads((ROOT / "tools" / "compile_gate_baseline.json").read_text())
    assert baseline["kernels"]
    assert all(set(archs) == {"sm_80", "sm_90"} for archs in baseline["kernels"].values())
