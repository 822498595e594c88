"""The direction of imports between the parts of megalite, and cycles between its modules.

LAYERS lists the parts from the top: a part may import what stands in a lower row, never a neighbour in its own row.
"""

import ast

from tests.style.rules import Source, imported_names

LAYERS = [
    ["__main__"],
    ["cli"],
    ["verify", "launch", "doctor"],
    ["train"],
    ["checkpoint", "plan"],
    ["optim", "model", "data"],
    ["parallel.tp", "parallel.pp", "parallel.zero"],
    ["kernels", "comm"],
    ["parallel.spec", "batch"],
    ["mesh"],
    ["config"],
    ["observe", "native", "gloo"],
]
"""Rows from the top; a name is a module or package of megalite."""

LEVEL = {part: -row for row, parts in enumerate(LAYERS) for part in parts}


def module_name(path: str) -> str:
    """megalite/comm/p2p.py -> megalite.comm.p2p; a package's __init__.py is the package."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def part_of(module: str) -> str | None:
    """The part of LAYERS that a module belongs to; "" for the empty packages on the way, None if unknown."""
    words = module.split(".")[1:]
    if words in ([], ["parallel"]):
        return ""
    for part in (".".join(words[:2]), words[0]):
        if part in LEVEL:
            return part
    return None


def imports(source: Source, modules: set[str]) -> list[tuple[ast.AST, str]]:
    """The modules of megalite that a file imports anywhere, as (statement, module)."""
    found = []
    for node in ast.walk(source.tree):
        for name in imported_names(node):
            if name.split(".")[0] != "megalite":
                continue
            names = [f"{name}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else [name]
            found += [(node, longer if longer in modules else name) for longer in names]
    return found


def check_direction(sources: list[Source]) -> list[str]:
    """Findings of imports that go up or sideways, and of modules that have no place in LAYERS."""
    package = {module_name(source.path): source for source in sources if source.in_package}
    found = []
    for module, source in package.items():
        own = part_of(module)
        if own is None:
            found.append(f"{source.path}:1: {module} has no place in LAYERS of tests/style/imports.py")
            continue
        for node, target in imports(source, set(package)):
            other = part_of(target)
            if own == other or other == "":
                continue
            if other is None or own == "" or LEVEL[other] >= LEVEL[own]:
                found.append(source.at(node, f"{own or module} must not import {target}"))
    return found


def find_cycles(sources: list[Source]) -> list[str]:
    """Each cycle among megalite's modules, as `a -> b -> a`."""
    package = {module_name(source.path): source for source in sources if source.in_package}
    edges = {module: {target for _, target in imports(s, set(package))} - {module} for module, s in package.items()}
    done: set[str] = set()
    cycles: list[str] = []

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            cycles.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for target in sorted(edges.get(module, ())):
                visit(target, [*path, module])
            done.add(module)

    for module in sorted(edges):
        visit(module, [])
    return cycles
