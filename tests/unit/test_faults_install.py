"""Faults of building, of choosing devices and of versions of other packages."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from megalite.train.main import pick_device
from megalite.train.ranks import Place
from tests.style.rules import all_sources

ROOT = Path(__file__).resolve().parents[2]

COMPILER = """#!/bin/sh
[ -e {hang} ] && echo $$ >> {hang} && exec sleep 600
while [ $# -gt 0 ]; do
    case "$1" in -o|-MF) touch "$2" ;; esac
    shift
done
"""
"""Makes the files it is asked for, after it has hung where the file `hang` exists."""


@pytest.fixture
def tree(tmp_path):
    """A copy of what a build needs, with a compiler that can hang."""
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc", ignore=shutil.ignore_patterns("*.cu"))  # no nvcc is asked
    (tmp_path / "megalite").mkdir()
    (tmp_path / "megalite" / "__init__.py").touch()
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER.format(hang=tmp_path / "hang"))
    compiler.chmod(0o755)
    return tmp_path


def start_build(tree: Path) -> subprocess.Popen:
    """A build in its own process group."""
    return subprocess.Popen(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=tree,
        env={"PATH": "/usr/bin:/bin", "CXX": str(tree / "compiler")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def test_a_killed_build_does_not_block_the_next(tree):
    """R01: kill -9 in the middle of the first compile; the next build has no lock to wait for, and finishes."""
    hang = tree / "hang"
    hang.touch()
    first = start_build(tree)
    try:
        deadline = time.monotonic() + 60
        while not hang.read_text():
            assert time.monotonic() < deadline, "the compiler was never started"
            assert first.poll() is None
            time.sleep(0.02)
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait(10)
        time.sleep(0.1)  # a compiler that has just begun writes its number
        for pid in map(int, hang.read_text().split()):  # ninja gives each a group of its own
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    hang.unlink()
    second = start_build(tree)
    assert second.wait(60) == 0
    info = json.loads((tree / "megalite" / "_build_info.json").read_text())
    assert (info["built"], info["error"]) == (True, None)
    assert list((tree / "megalite").glob("_C*"))


@pytest.mark.parametrize(
    ("place", "num_gpus", "want"),
    [
        (Place(5, 5, 8, 8), 1, 0),  # the launcher shows each task its own GPU
        (Place(5, 5, 8, 8), 8, 5),
        (Place(13, 5, 16, 8), 8, 5),  # by local rank, not by rank
        (Place(1, 1, 2, 2), 2, 1),  # CUDA_VISIBLE_DEVICES=1,0: the second visible one, whatever its number
        (Place(), 1, 0),
    ],
)
def test_rank_to_gpu(monkeypatch, place, num_gpus, want):
    """R04."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert pick_device("auto", place) == pick_device("cuda", place) == torch.device("cuda", want)
    assert pick_device("cpu", place) == torch.device("cpu")


def test_more_ranks_than_gpus(monkeypatch):
    """R04: two of the numbers disagree, so nothing is guessed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ValueError, match="local rank 5 has no GPU: 4 visible for 8 ranks"):
        pick_device("auto", Place(5, 5, 8, 8))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto", Place(5, 5, 8, 8)) == torch.device("cpu")
    with pytest.raises(ValueError, match="torch sees no GPU"):
        pick_device("cuda", Place())


ADVICE = re.compile(
    r"\b(pip|uv|conda)\b.*\binstall\b.*\bapex\b"  # words
    r"|^\s*[\"']?apex\s*(==|>=|<=|~=|!=|\[)|^\s*[\"']apex[\"'],?\s*$|^apex$"  # requirements
)


def advises(line: str) -> bool:
    """Whether a line would bring somebody the package `apex` of the index: as a dependency, or by its words."""
    return ADVICE.search(line) is not None and "NVIDIA" not in line


def test_nobody_is_told_to_install_a_package_of_the_same_name():
    """I01: `apex` of the package index is not NVIDIA's; no metadata and no message leads to it."""
    planted = ("run pip install apex", '    "apex>=0.1",', "apex==0.9", "uv pip install ninja apex", '"apex",')
    assert all(advises(line) for line in planted)
    assert not any(advises(line) for line in ("apex = why_no_apex()", "pip install from github.com/NVIDIA/apex"))
    files = [file for file in ROOT.iterdir() if file.suffix in (".toml", ".md", ".txt", ".py")]
    files += [ROOT / "Makefile", *(ROOT / "megalite").rglob("*.py"), *(ROOT / "configs").glob("*.yaml")]
    assert len(files) > 80
    found = [f"{file}: {line}" for file in files for line in file.read_text("utf-8").splitlines() if advises(line)]
    assert found == []


REMOVED = {
    "float", "int", "bool", "object", "complex", "str", "long", "unicode", "product", "cumproduct", "sometrue",
    "alltrue", "in1d", "row_stack", "trapz", "float_", "complex_", "string_", "unicode_", "Inf", "Infinity", "NaN",
    "infty", "PINF", "NINF", "asfarray", "msort", "round_", "find_common_type", "cast", "source", "mat", "core",
}  # fmt: skip
"""Names that numpy 1.24 to 2.x took away."""
ADDED = {"concat", "astype", "permute_dims", "matrix_transpose", "vecdot", "matvec", "vecmat", "bitwise_count", "pow",
         "unique_values", "unique_counts", "cumulative_sum", "cumulative_prod", "unstack", "isdtype"}  # fmt: skip
"""Names that numpy 1.26 does not have."""


def numpy_names(tree: ast.Module) -> set[str]:
    """X of every np.X and of `from numpy import X`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("np", "numpy"):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "numpy":
            found |= {alias.name for alias in node.names} | set(node.module.split(".")[1:])
    return found


def test_numpy_names_exist_in_all_versions():
    """D13: no private name, none that a later or an earlier numpy lacks."""
    assert numpy_names(ast.parse("from numpy.core import x\nnp.product(1)")) == {"core", "x", "product"}
    used = {name for source in all_sources() if source.in_package for name in numpy_names(source.tree)}
    assert len(used) > 10
    assert sorted(name for name in used if name.startswith("_") or name in REMOVED | ADDED) == []
    assert sorted(name for name in used if not hasattr(np, name)) == []
