"""The optimizer's CUDA sources on host threads: right numbers, no access out of bounds, no race.

The same .cu files are built by the C++ compiler against tests/cuda_host/emulator.h, once under AddressSanitizer and
once under ThreadSanitizer. Planted faults (a barrier left out, a mask taken away) must be reported, or the gate is
worthless.
"""

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from megalite import native
from megalite.kernels.adamw import Hyper, cases
from megalite.kernels.adamw.table import address_table
from tests.kernels import symm_host

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
HOST = ROOT / "tests" / "cuda_host"
SOURCES = ("adamw.cu", "grad_norm.cu")
COMPILER = shutil.which("g++")
FLAGS = ["-std=c++20", "-O1", "-g1", "-ffp-contract=off", "-pthread", "-fno-sanitize-recover=all"]
FLAGS += ["-Wall", "-Wextra", "-Wno-unknown-pragmas"]
FLAGS += ["-DMEGALITE_HOST_EMULATOR", "-DMEGALITE_THREADS=64", "-DMEGALITE_MAX_BLOCKS=3"]
CHUNK = 64 * 8
"""Elements that a block of 64 threads updates at once."""
HYPER = Hyper(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, step=3)
SLICES = [(0.1, 0, 2 * CHUNK), (0.0, 2 * CHUNK, 37), (0.1, 2 * CHUNK + 40, 0), (0.1, 2 * CHUNK + 40, 5 * CHUNK + 5)]
UNALIGNED = [(0.1, 1, CHUNK + 3)]
MANY = [(0.01 * i, 8 * i, 7) for i in range(50)]  # more than one launch's table

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


def build(folder: Path, sanitizer: str, csrc: Path = CSRC) -> Path:
    """Compile the driver with the .cu files of `csrc`."""
    binary = folder / "emulator"
    includes = [f"-I{include}" for include in (csrc, csrc / "include", HOST)]
    command = [COMPILER, *FLAGS, f"-fsanitize={sanitizer}", *includes, str(HOST / "main.cpp"), "-o", str(binary)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return binary


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """The build that reports accesses out of bounds."""
    return build(tmp_path_factory.mktemp("address"), "address,undefined")


@pytest.fixture(scope="module")
def raced(tmp_path_factory):
    """The build that reports races."""
    return build(tmp_path_factory.mktemp("thread"), "thread")


def run(binary: Path, *words, line: int = 0) -> subprocess.CompletedProcess:
    environment = {"TSAN_OPTIONS": "exitcode=66", "ASAN_OPTIONS": "detect_leaks=0", "PATH": "/usr/bin:/bin"}
    command = [str(binary), str(line), *(str(word) for word in words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def adam_words(folder: Path, slices: list[tuple], *, copies: bool = True) -> tuple[list, list[torch.Tensor]]:
    """Write the inputs that the slices cover, nothing behind them; the driver's words and the tensors."""
    num = max(offset + length for _, offset, length in slices)
    case = cases.make_case(num, dtype=torch.float32)
    tensors = [tensor.detach() for tensor in case.inputs(seed=num)[0]]
    for name, tensor in zip(("main", "grad", "exp_avg", "exp_avg_sq"), tensors, strict=True):
        (folder / name).write_bytes(tensor.numpy().tobytes())
    numbers = [HYPER.lr, HYPER.beta1, HYPER.beta2, HYPER.eps, HYPER.step, cases.SCALE, num, int(copies)]
    return ["adamw", folder, *numbers, *(f"{d}:{o}:{n}" for d, o, n in slices)], tensors


def output(folder: Path, name: str, dtype: type) -> np.ndarray:
    return np.frombuffer((folder / f"{name}.out").read_bytes(), dtype)


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("slices", [SLICES, UNALIGNED, MANY], ids=["slices", "unaligned", "many"])
def test_adamw_gives_the_bits_of_the_cpu_kernel(checked, tmp_path, slices, copies):
    words, tensors = adam_words(tmp_path, slices, copies=copies)
    done = run(checked, *words)
    assert done.returncode == 0, done.stderr
    names = ("main", "exp_avg", "exp_avg_sq")
    found = {name: output(tmp_path, name, np.float32) for name in names}
    expected = {name: tensors[i].clone() for name, i in zip(names, (0, 2, 3), strict=True)}
    copy = np.full(len(found["main"]), 0xFFFF, np.uint16)
    for decay, begin, length in slices:
        run_of = slice(begin, begin + length)
        hyper = Hyper(**{**vars(HYPER), "weight_decay": decay})
        truths = cases.truth(*(t[run_of].double() for t in tensors), hyper=hyper)
        for name, truth in zip(names, truths, strict=True):
            one = torch.from_numpy(found[name][run_of].copy())
            torch.testing.assert_close(one.double(), truth, rtol=4e-7, atol=1e-9)
            expected[name][run_of] = one
        bits = torch.from_numpy(found["main"][run_of].copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)
        copy[run_of] = bits if copies else 0xFFFF
    for name in names:  # nothing between and behind the slices was touched
        assert np.array_equal(found[name], expected[name].numpy())
    assert np.array_equal(output(tmp_path, "copy", np.uint16), copy)
    if native.load() is not None:
        assert_equals_native(found, tensors, slices)


def assert_equals_native(found: dict, tensors: list[torch.Tensor], slices: list[tuple]) -> None:
    main, grad, exp_avg, exp_avg_sq = (tensor.clone() for tensor in tensors)
    for decay, begin, length in slices:
        run_of = slice(begin, begin + length)
        table = address_table([cases.Tensors(main[run_of], grad[run_of], exp_avg[run_of], exp_avg_sq[run_of])])
        numbers = (HYPER.lr, HYPER.beta1, HYPER.beta2, HYPER.eps)
        native.load().adamw(table, np.array([decay]), numbers, HYPER.step, cases.SCALE, 1)
    for name, tensor in {"main": main, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}.items():
        assert np.array_equal(found[name], tensor.numpy()), name


@pytest.mark.parametrize(("num", "offset"), [(0, 0), (1, 0), (5, 0), (1024, 0), (4099, 0), (4099, 1), (1000, 3)])
def test_square_sum(checked, tmp_path, num, offset):
    grad = np.random.default_rng(num).standard_normal(num + offset).astype(np.float32)
    (tmp_path / "grad").write_bytes(grad.tobytes())
    done = run(checked, "square_sum", tmp_path, num, offset)
    assert done.returncode == 0, done.stderr
    (found,) = output(tmp_path, "sum", np.float64)
    assert found == pytest.approx(float((grad[offset:].astype(np.float64) ** 2).sum()), rel=1e-14, abs=0.0)


def square_sum_words(folder: Path, num: int = 4099) -> list:
    (folder / "grad").write_bytes(np.ones(num, np.float32).tobytes())
    return ["square_sum", folder, num, 0]


def words_of(source: str, folder: Path) -> list:
    """A run of the kernels of one .cu file."""
    return adam_words(folder, SLICES)[0] if source == "adamw.cu" else square_sum_words(folder)


@pytest.mark.parametrize("source", SOURCES)
def test_no_race(raced, tmp_path, source):
    done = run(raced, *words_of(source, tmp_path))
    assert done.returncode == 0, done.stderr


def barriers(source: str) -> list[int]:
    """Lines with a __syncthreads()."""
    lines = (CSRC / source).read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if "__syncthreads()" in line]


@pytest.mark.parametrize(("source", "line"), [(source, line) for source in SOURCES for line in barriers(source)])
def test_each_barrier_left_out_is_a_reported_race(raced, tmp_path, source, line):
    done = run(raced, *words_of(source, tmp_path), line=line)
    assert done.returncode == 66
    assert "data race" in done.stderr
    assert source in done.stderr


MUTANTS = {
    "chunk mask": ("adamw.cu", r"begin \+ kChunk <= s\.num", "true"),
    "vector mask": ("grad_norm.cu", r"num / 4 : 0", "num / 4 + 1 : 0"),
}


def test_every_mask_taken_away_is_reported(tmp_path):
    """Both faults in one build: each is in another kernel."""
    csrc = tmp_path / "csrc"
    shutil.copytree(CSRC, csrc)
    for source, mask, broken in MUTANTS.values():
        text, num = re.subn(mask, broken, (csrc / source).read_text())
        assert num == 1
        (csrc / source).write_text(text)
    binary = build(tmp_path, "address", csrc)
    for source in SOURCES:
        done = run(binary, *words_of(source, tmp_path))
        assert done.returncode != 0, f"{source} read out of bounds unseen"
        assert "heap-buffer-overflow" in done.stderr


def test_the_kernels_sources_are_all_here():
    """A new .cu file with kernels needs a place in these tests."""
    with_kernels = {path.name for path in CSRC.glob("*.cu") if "__global__" in path.read_text()}
    assert with_kernels == set(SOURCES) | set(symm_host.SOURCES)
