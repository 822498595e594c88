"""The rules applied to the whole project."""

from pathlib import Path

import pytest

from tests.style.imports import check_direction, find_cycles
from tests.style.rules import RULES, all_sources


@pytest.fixture(scope="module")
def sources():
    found = all_sources()
    assert len([source for source in found if source.in_package]) > 20
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(rule, sources):
    findings = [finding for source in sources for finding in rule(source)]
    assert not findings, "\n".join([rule.__doc__, *findings])


def test_imports_go_one_way(sources):
    findings = check_direction(sources)
    assert not findings, "\n".join(findings)


def test_no_import_cycle(sources):
    assert not find_cycles(sources)


def test_pytest_collects_every_test_folder(pytestconfig):
    """pytest leaves out folders named dist unless it is told otherwise."""
    tests = Path(__file__).resolve().parents[1]
    folders = {path.relative_to(tests).parts[0] for path in tests.rglob("test_*.py")}
    assert {"unit", "kernels", "dist", "style"} <= folders
    assert not folders & set(pytestconfig.getini("norecursedirs"))
