"""The list of public faults is complete, and each fault names tests that exist or says why it can't occur.

Tests are named by node id. A name in brackets is a layout of `tests/dist/layouts.py`; without one, all cases of a
test are meant.
"""

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.dist.layouts import LAYOUTS

ROOT = Path(__file__).resolve().parents[2]
MAP = yaml.safe_load((ROOT / "tests" / "public_faults.yaml").read_text(encoding="utf-8"))
SIZES = {"layout": 14, "pipeline": 12, "zero": 13, "optimizer": 8, "data": 11, "launch": 13}
"""Faults in each of the categories that must be complete."""
NODE = re.compile(r"(?P<file>tests/(?:unit|dist|kernels)/test_\w+\.py)::(?P<name>test_\w+)(?:\[(?P<case>[\w-]+)\])?")
CASES = {"test_layout_trains_as_one_device": LAYOUTS}
"""Tests of which single cases may be named, and their names."""
TAG = re.compile(r"\b(?:[PLZOCDKRMI](?:0\d|1\d)|N0[12])\b")


@cache
def functions_of(file: str) -> dict[str, str]:
    """Name -> docstring of the test functions of a file."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    found = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))
    return {node.name: ast.get_docstring(node) or "" for node in found}


def problems(number: str, fault: dict[str, Any]) -> list[str]:
    """What is wrong with one entry."""
    found = [f"{number}: key {key}" for key in fault.keys() - {"title", "category", "tests", "by_construction", "note"}]
    found += [f"{number}: no {key}" for key in ("title", "category") if not str(fault.get(key) or "").strip()]
    if not fault.get("tests") and len(str(fault.get("by_construction") or "")) < 20:
        found.append(f"{number}: neither a test nor a reason")
    found += [f"{number}: empty {key}" for key in ("by_construction", "note") if key in fault and not fault[key]]
    return found + [f"{number}: {node}: {why}" for node in fault.get("tests", []) if (why := missing(node))]


def missing(node: str) -> str:
    """Why a node id names no test, or "" when it does."""
    match = NODE.fullmatch(node)
    if match is None:
        return "not a node id"
    if not (ROOT / match["file"]).is_file():
        return "no such file"
    if match["name"] not in functions_of(match["file"]):
        return "no such test"
    if match["case"] is not None and match["case"] not in CASES.get(match["name"], ()):
        return "no such case"
    return ""


@pytest.mark.parametrize("number", MAP["faults"])
def test_each_fault_has_tests_or_a_reason(number):
    assert problems(number, MAP["faults"][number]) == []


def test_the_list_is_complete():
    assert {category: len(set(ids)) for category, ids in MAP["complete"].items()} == SIZES
    for category, ids in MAP["complete"].items():
        assert [number for number, fault in MAP["faults"].items() if fault["category"] == category] == ids


def test_tests_that_name_a_fault_are_in_its_entry():
    """A number in the docstring of a test of faults is a promise that the entry repeats."""
    for file in sorted(ROOT.glob("tests/*/test_faults_*.py")):
        path = file.relative_to(ROOT).as_posix()
        for name, text in functions_of(path).items():
            for number in TAG.findall(text):
                assert number in MAP["faults"], f"{name} names {number}, which the list does not have"
                nodes = {node.split("[")[0] for node in MAP["faults"][number].get("tests", [])}
                assert f"{path}::{name}" in nodes, f"{name} is for {number}, but its entry does not say so"


def test_mistakes_in_an_entry_are_found():
    node = "tests/unit/test_mesh.py::test_rank_and_coordinates_are_inverse"
    good = {"title": "x", "category": "data", "tests": [node]}
    assert problems("X1", good) == []
    for change, what in [
        ({"tests": ["tests/unit/test_mesh.py::test_nothing"]}, "no such test"),
        ({"tests": ["tests/unit/test_nowhere.py::test_x"]}, "no such file"),
        ({"tests": ["tests/dist/test_layouts.py::test_layout_trains_as_one_device[tp3]"]}, "no such case"),
        ({"tests": ["test_mesh"]}, "not a node id"),
        ({"tests": []}, "neither a test nor a reason"),
        ({"tests": [], "by_construction": " "}, "neither a test nor a reason"),
        ({"title": ""}, "no title"),
        ({"reason": "x"}, "key reason"),
    ]:
        assert any(what in problem for problem in problems("X1", good | change)), what
