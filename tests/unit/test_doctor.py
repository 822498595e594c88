"""`megalite doctor`: what it says about machines unlike this one, and that it works on this one."""

import pytest

from megalite import doctor
from megalite.cli import main
from megalite.doctor import extension, gpu, no_gpu, shared_memory

TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040)."
BUILT = {"built": True, "cuda": True, "compiler": "/usr/bin/g++", "nvcc": "/usr/bin/nvcc", "error": None}


@pytest.mark.parametrize(
    ("cuda", "has_driver", "error", "state", "words"),
    [
        (None, False, "", "absent", "torch was built without CUDA; training runs on the CPU"),
        (None, True, "", "problem", "install a CUDA build of torch"),
        ("13.0", True, TOO_OLD, "problem", "update the NVIDIA driver"),
        ("13.0", False, "Found no NVIDIA driver on your system.", "absent", "no NVIDIA driver"),
        ("13.0", True, "No CUDA GPUs are available", "problem", "CUDA_VISIBLE_DEVICES may hide GPUs"),
    ],
)
def test_why_there_is_no_gpu(cuda, has_driver, error, state, words):
    finding = no_gpu(cuda, has_driver=has_driver, error=error)
    assert finding.state == state
    assert words in f"{finding.text} {finding.hint}"


@pytest.mark.parametrize(
    ("name", "capability", "state", "words"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0), "ok", "80 GiB, compute capability 9.0, 989 TFLOP/s dense bf16"),
        ("NVIDIA Future 1", (13, 0), "ok", "metrics have no MFU"),
        ("Tesla V100-SXM2-16GB", (7, 0), "problem", "use precision.compute=fp32"),
    ],
)
def test_gpus(name, capability, state, words):
    finding = gpu("gpu 0", name, 80 << 30, capability)
    assert finding.state == state
    assert words in f"{finding.text} {finding.hint}"


@pytest.mark.parametrize(
    ("missing", "free_bytes", "state", "words"),
    [
        (None, 300 << 20, "ok", "300 MiB free in /dev/shm"),
        (None, 9 << 20, "problem", "9 MiB free in /dev/shm for collectives of CPU ranks 64 MiB are comfortable"),
        ("/dev/shm is not there", 0, "absent", "/dev/shm is not there: collectives of CPU ranks go through gloo"),
    ],
)
def test_shared_memory(missing, free_bytes, state, words):
    finding = shared_memory(missing, free_bytes)
    assert finding.state == state
    assert words in f"{finding.text} {finding.hint}"


@pytest.mark.parametrize(
    ("info", "missing", "state", "words"),
    [
        (BUILT, None, "ok", "CUDA parts by /usr/bin/nvcc"),
        (BUILT | {"cuda": False, "nvcc": None}, None, "ok", "no nvcc on the PATH"),
        (BUILT | {"cuda": False}, None, "ok", "no CUDA parts, although there is /usr/bin/nvcc"),
        (BUILT | {"cuda": False, "error": "nvcc: fatal"}, None, "problem", "CUDA parts failed: nvcc: fatal"),
        ({}, "No module named megalite._C", "absent", "install g++"),
        (BUILT | {"built": False}, "undefined symbol: x", "problem", "but /usr/bin/g++ is there"),
    ],
)
def test_the_extension(info, missing, state, words):
    finding = extension(info, missing)
    assert finding.state == state
    assert words in f"{finding.text} {finding.hint}"


@pytest.mark.parametrize(
    ("problem", "state"),
    [("", "ok"), ("Apex is not installed; see x", "absent"), ("the installed `apex` is not NVIDIA's", "problem")],
)
def test_apex(monkeypatch, problem, state):
    monkeypatch.setattr(doctor, "apex_problem", lambda: problem)
    (finding,) = [f for f in doctor.findings() if f.name == "apex"]
    assert finding.state == state


@pytest.mark.parametrize(
    ("missing", "interpreted", "state", "words"),
    [
        ("", False, "ok", "GPU"),
        ("", True, "problem", "unset TRITON_INTERPRET"),
        ("Triton is not installed (pip install 'triton>=3.6')", False, "absent", "fall back to the reference"),
    ],
)
def test_triton(monkeypatch, missing, interpreted, state, words):
    monkeypatch.setattr(doctor, "triton_missing", lambda: missing)
    monkeypatch.setattr(doctor, "interpreting", lambda: interpreted)
    (finding,) = [f for f in doctor.findings() if f.name == "triton"]
    assert finding.state == state
    assert words in f"{finding.text} {finding.hint}"


def test_the_report_of_this_machine(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("megalite 0.1.0 on ")
    for name in ("torch", "gpu", "triton", "extension", "collectives", "apex"):
        assert f"  {name}" in out
    assert any(f"{name}: rmsnorm" in out for name in ("reference", "native", "triton"))
