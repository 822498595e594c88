"""Every rule finds what it is for in a small bad snippet, and leaves the good twin alone."""

import pytest

from tests.style import rules
from tests.style.imports import LAYERS, check_direction, find_cycles, module_name, part_of
from tests.style.rules import parse
from tests.style.sizes import measure, percentile, report

CASES = {
    "check_file_size": ("x = 1\n" * 501, "x = 1\n" * 500),
    "check_function_size": ("def f():\n" + "    x = 1\n" * 60, "def f():\n" + "    x = 1\n" * 59),
    "check_arguments": ("def f(a, b, *, c, d, e, f, g, h, i): ...", "def f(self, a, b, *, c, d, e, f, g, h): ..."),
    "check_global": ("def f():\n    global x", "x = 1"),
    "check_environment": ("import os\nx = os.environ", "import os\nx = os.getcwd()"),
    "check_function_imports": ("def f():\n    import megalite.mesh", "import megalite.mesh\ndef f():\n    import json"),
    "check_import_guards": (
        "try:\n    import triton\nexcept ImportError:\n    pass",
        "try:\n    f()\nexcept KeyError:\n    pass",
    ),
    "check_relative_imports": ("from . import mesh", "from megalite import mesh"),
    "check_ascii": ("x = '\u2192'", "x = '->'"),
    "check_module_docstring": ("x = 1", '"""What it is."""\nx = 1'),
}


def test_every_rule_has_a_case():
    assert {rule.__name__ for rule in rules.RULES} == set(CASES) | {"check_names"}


@pytest.mark.parametrize("name", CASES)
def test_bad_is_found_and_good_is_not(name):
    bad, good = CASES[name]
    rule = getattr(rules, name)
    assert len(rule(parse("megalite/a/b.py", bad))) == 1
    assert rule(parse("megalite/a/b.py", bad))[0].startswith("megalite/a/b.py:")
    assert rule(parse("megalite/a/b.py", good)) == []


@pytest.mark.parametrize(
    "code", ["from os import environ", "import os\nos.getenv('A')", "import os as o\nx = o.environ['A']"]
)
def test_every_way_to_read_the_environment(code):
    assert rules.check_environment(parse("megalite/a.py", code))
    assert not rules.check_environment(parse("megalite/cli.py", code))
    assert not rules.check_environment(parse("tests/a.py", code))


@pytest.mark.parametrize("caught", ["ImportError", "ModuleNotFoundError", "(OSError, ImportError)", "Exception"])
def test_every_import_guard(caught):
    code = f"try:\n    import triton\nexcept {caught}:\n    triton = None"
    assert rules.check_import_guards(parse("megalite/model/a.py", code))
    assert not rules.check_import_guards(parse("megalite/kernels/a/op.py", code))
    assert not rules.check_import_guards(parse("megalite/native.py", code))
    reraised = code.replace("triton = None", "raise")
    assert not rules.check_import_guards(parse("megalite/model/a.py", reraised))


def test_function_imports_are_found_in_every_form():
    for statement in ("from megalite.mesh import Group", "from megalite import mesh", "import megalite"):
        assert rules.check_function_imports(parse("megalite/a.py", f"class A:\n    def f(self):\n        {statement}"))
        assert not rules.check_function_imports(parse("megalite/cli.py", f"def f():\n    {statement}"))


def test_kernels_and_autograd_functions_have_their_own_limits():
    arguments = "a, b, c, d, e, f, g, h, i"
    assert not rules.check_arguments(parse("megalite/a.py", f"@triton.jit\ndef f({arguments}): ..."))
    assert not rules.check_arguments(parse("megalite/a.py", f"def forward(ctx, {arguments}): ..."))
    body = "    x = 1\n" * 100
    assert not rules.check_function_size(parse("megalite/a.py", f"@triton.jit\ndef f():\n{body}"))
    assert rules.check_function_size(parse("megalite/a.py", f"@triton.jit\ndef f():\n{body}{body}"))


def test_names():
    assert rules.check_names(parse("megalite/a/utils.py", ""))
    assert not rules.check_names(parse("megalite/a/ring_utils.py", ""))


def test_an_empty_file_needs_no_docstring():
    assert not rules.check_module_docstring(parse("megalite/a/__init__.py", "\n"))


def package(**files):
    """Modules by dotted name below megalite (dots as __) with their code."""
    return [parse(f"megalite/{name.replace('__', '/')}.py", code) for name, code in files.items()]


@pytest.mark.parametrize(
    ("files", "match"),
    [
        (
            {"comm__p2p": "from megalite.train.loop import run", "train__loop": ""},
            "comm must not import megalite.train.loop",
        ),
        ({"comm__p2p": "from megalite import cli", "cli": ""}, "comm must not import megalite.cli"),
        (
            {"comm__p2p": "import megalite.kernels.norm", "kernels__norm": ""},
            "comm must not import megalite.kernels.norm",
        ),
        (
            {"parallel__tp__a": "from megalite.parallel.pp import b", "parallel__pp__b": ""},
            "parallel.tp must not import",
        ),
        ({"parallel__tp__a": "from megalite.parallel import pp"}, None),
        ({"mesh": "def f():\n    from megalite.batch import B", "batch": ""}, "mesh must not import megalite.batch"),
        ({"strange__a": ""}, "has no place in LAYERS"),
        (
            {
                "train__loop": "from megalite.mesh import Mesh\nfrom megalite.train import step",
                "mesh": "",
                "train__step": "",
            },
            None,
        ),
        ({"model__a": "from megalite.parallel.spec import Part", "parallel__spec": ""}, None),
    ],
)
def test_direction(files, match):
    findings = check_direction(package(**files))
    if match is None:
        assert findings == []
    else:
        assert len(findings) == 1
        assert match in findings[0]


def test_direction_sees_a_package_named_through_its_parent():
    files = {"parallel__tp__a": "from megalite.parallel import pp", "parallel__pp____init__": ""}
    sources = package(**files)
    sources[1] = parse("megalite/parallel/pp/__init__.py", "")
    assert len(check_direction(sources)) == 1


def test_layers_name_each_part_once():
    names = [part for row in LAYERS for part in row]
    assert len(names) == len(set(names))
    assert part_of("megalite.parallel.spec") == "parallel.spec"
    assert part_of("megalite.parallel") == ""
    assert part_of("megalite.parallel.other") is None
    assert module_name("megalite/comm/__init__.py") == "megalite.comm"


def test_cycles():
    a, b, c = "from megalite.a import b", "from megalite.a.c import x", "import megalite.a.a"
    assert find_cycles(package(a__a=a, a__b=b, a__c=c)) == [
        "megalite.a.a -> megalite.a.b -> megalite.a.c -> megalite.a.a"
    ]
    assert find_cycles(package(a__a=a, a__b=b, a__c="")) == []


def test_sizes():
    assert [percentile([5, 1, 3, 2, 4], p) for p in (0, 50, 90, 100)] == [1, 3, 5, 5]
    assert percentile([], 50) == 0
    sources = [
        parse("megalite/a.py", "def f():\n    pass\n"),
        parse("megalite/b.py", ""),
        parse("tests/c.py", "x\n" * 9),
    ]
    assert measure(sources) == {"file": (2, 2), "function": (2, 2)}
    assert report(sources).splitlines()[0] == "file: median 2 (aim 180), p90 2 (aim 320)"
