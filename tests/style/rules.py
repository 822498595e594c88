"""The project's rules as functions over parsed files: each returns its findings as `path:line: what is wrong`.

Rules see only the syntax tree and the path relative to the repository, so each is tested with small bad snippets.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE, MAX_FUNCTION, MAX_KERNEL, MAX_ARGUMENTS = 500, 60, 120, 8

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One parsed file; `path` is relative to the repository, with forward slashes."""

    path: str
    text: str
    tree: ast.Module

    @property
    def in_package(self) -> bool:
        """Whether it is part of megalite itself."""
        return self.path.startswith("megalite/")

    def at(self, node: ast.AST, text: str) -> str:
        """One finding."""
        return f"{self.path}:{node.lineno}: {text}"


def parse(path: str, text: str) -> Source:
    """A file of the repository, or a snippet that stands for one."""
    return Source(path, text, ast.parse(text, path))


def all_sources() -> list[Source]:
    """Every Python file of the project."""
    files = [ROOT / "setup.py"]
    for folder in ("megalite", "tests", "tools"):
        files += sorted((ROOT / folder).rglob("*.py"))
    return [parse(file.relative_to(ROOT).as_posix(), file.read_bytes().decode()) for file in files]


def functions(source: Source) -> Iterator[FunctionNode]:
    """All functions and methods, nested ones too."""
    return (node for node in ast.walk(source.tree) if isinstance(node, FunctionNode))


def is_kernel(node: FunctionNode) -> bool:
    """Whether it is the body of a GPU kernel: decorated with something.jit."""
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def length(node: FunctionNode) -> int:
    """Lines from `def` to the last one."""
    return node.end_lineno - node.lineno + 1


def check_file_size(source: Source) -> list[str]:
    """No file is longer than MAX_FILE lines."""
    lines = len(source.text.splitlines())
    return [f"{source.path}:1: {lines} lines, limit {MAX_FILE}"] if lines > MAX_FILE else []


def check_function_size(source: Source) -> list[str]:
    """No function is longer than MAX_FUNCTION lines; a kernel body than MAX_KERNEL."""
    return [
        source.at(node, f"{node.name} has {length(node)} lines, limit {limit}")
        for node in functions(source)
        if length(node) > (limit := MAX_KERNEL if is_kernel(node) else MAX_FUNCTION)
    ]


def _named(node: FunctionNode) -> list[str]:
    """Positional parameters without self and cls, and without autograd's ctx."""
    names = [argument.arg for argument in node.args.posonlyargs + node.args.args]
    return names[1:] if names and names[0] in ("self", "cls", "ctx") else names


def check_arguments(source: Source) -> list[str]:
    """At most MAX_ARGUMENTS arguments; kernels and autograd functions take what they are given."""
    found = []
    for node in functions(source):
        num = len(_named(node)) + len(node.args.kwonlyargs)
        autograd = any(argument.arg == "ctx" for argument in node.args.args[:1])
        if num > MAX_ARGUMENTS and not is_kernel(node) and not autograd:
            found.append(source.at(node, f"{node.name} takes {num} arguments, limit {MAX_ARGUMENTS}"))
    return found


def check_global(source: Source) -> list[str]:
    """No `global` statement anywhere."""
    return [source.at(node, "global statement") for node in ast.walk(source.tree) if isinstance(node, ast.Global)]


def check_environment(source: Source) -> list[str]:
    """Only cli.py reads the environment; all else gets it passed."""
    if not source.in_package or source.path == "megalite/cli.py":
        return []
    words = ("environ", "environb", "getenv", "getenvb")
    found = []
    for node in ast.walk(source.tree):
        attribute = isinstance(node, ast.Attribute) and node.attr in words
        imported = isinstance(node, ast.ImportFrom) and node.module == "os" and any(n.name in words for n in node.names)
        if attribute or imported:
            found.append(source.at(node, "reads the environment; take it as an argument from cli.py"))
    return found


def check_function_imports(source: Source) -> list[str]:
    """No import of megalite inside a function, except in cli.py (which must start fast)."""
    if not source.in_package or source.path == "megalite/cli.py":
        return []
    return [
        source.at(inner, f"imports megalite inside {node.name}")
        for node in functions(source)
        for inner in ast.walk(node)
        if any(name.split(".")[0] == "megalite" for name in imported_names(inner))
    ]


def imported_names(node: ast.AST) -> list[str]:
    """The dotted modules that one statement names; relative imports count as megalite's."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""] if node.level == 0 else ["megalite"]
    return []


def check_import_guards(source: Source) -> list[str]:
    """try/except ImportError only where implementations are chosen: kernels/ and native.py; re-raising is no guard."""
    if not source.in_package or source.path.startswith("megalite/kernels/") or source.path == "megalite/native.py":
        return []
    found = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Try):
            imports = any(isinstance(n, ast.Import | ast.ImportFrom) for part in node.body for n in ast.walk(part))
            swallowed = [handler for handler in node.handlers if not isinstance(handler.body[-1], ast.Raise)]
            caught = " ".join(ast.unparse(handler.type) if handler.type else "" for handler in swallowed)
            if (swallowed and imports) or "ImportError" in caught or "ModuleNotFoundError" in caught:
                found.append(source.at(node, "import guard outside kernels/ and native.py"))
    return found


def check_relative_imports(source: Source) -> list[str]:
    """Imports are absolute, so that a reader and the other rules see what they name."""
    return [
        source.at(node, "relative import")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]


def check_names(source: Source) -> list[str]:
    """No utils.py: a file says what it holds."""
    return [f"{source.path}:1: name the file for what it holds"] if source.path.endswith("/utils.py") else []


def check_ascii(source: Source) -> list[str]:
    """ASCII only."""
    return [
        f"{source.path}:{number}: not ASCII"
        for number, line in enumerate(source.text.splitlines(), 1)
        if not line.isascii()
    ]


def check_module_docstring(source: Source) -> list[str]:
    """Every file that holds anything says what it is."""
    empty = not source.text.strip()
    return [] if empty or ast.get_docstring(source.tree) else [f"{source.path}:1: no module docstring"]


RULES = [value for name, value in sorted(globals().items()) if name.startswith("check_")]
