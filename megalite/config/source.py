"""Reading config text: YAML with `extends:` and `key=value` overrides, as a tree that knows where each value is from.

A tree is a dict of dicts that ends in `Leaf(value, origin)`; merging two trees replaces leaves and keeps the origins.
Scalars follow the YAML 1.2 core schema, so `1e-4` is a number and `no` is a text; a key given twice is an error.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megalite.config.presets import find_config, near_names, preset_names

MAX_FILE_BYTES = 1_000_000
MAX_NODES = 100_000


class SourceError(ValueError):
    """A config text that can't be read; the message names the file and, where there is one, the line."""


@dataclass(frozen=True)
class Leaf:
    """A value and where it was given: `file:line` or `override`."""

    value: Any
    origin: str


Tree = dict[str, Any]
"""str -> Tree | Leaf"""


def read_file(path: Path, *, seen: tuple[Path, ...] = ()) -> Tree:
    """The tree of one file on top of the files that it extends.

    Raises:
        SourceError: the file can't be read or parsed, or the chain of `extends` comes back to it.
    """
    if path.resolve() in seen:
        chain = " -> ".join(p.name for p in (*seen, path))
        raise SourceError(f"{path}: extends comes back to itself: {chain}; remove one of the extends")
    tree = parse(read_text(path), name=_short(path))
    base = tree.pop("extends", None)
    if base is None:
        return tree
    if not isinstance(base, Leaf) or not isinstance(base.value, str):
        raise SourceError(f"{path}: extends must be one file or preset; use extends: other.yaml")
    base_path = find_config(base.value, beside=path.parent)
    if not base_path.is_file():
        raise SourceError(f"{base.origin}: extends={base.value}: {_no_such_file(base.value)}")
    return merge(read_file(base_path, seen=(*seen, path.resolve())), tree)


def _short(path: Path) -> str:
    """The path from the working directory when it is below it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def read_text(path: Path) -> str:
    """The text of a config file.

    Raises:
        SourceError: there is no such file, it is not a text, or it is far too large for a config.
    """
    try:
        if path.exists() and not path.is_file():
            raise SourceError(f"{path}: is {'a folder' if path.is_dir() else 'not a regular file'}; give a YAML file")
        if path.is_file() and path.stat().st_size > MAX_FILE_BYTES:
            raise SourceError(f"{path}: {path.stat().st_size} bytes is too large for a config; give a YAML file")
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise SourceError(f"{path}: {_no_such_file(str(path))}") from None
    except UnicodeDecodeError as error:
        raise SourceError(f"{path}: byte {error.start} is not UTF-8; give a YAML text file") from None
    except OSError as error:
        raise SourceError(f"{path}: can't be read: {error.strerror}") from None


def _no_such_file(name: str) -> str:
    near = near_names(Path(name).stem, preset_names()) or preset_names()
    return f"no such file; give a YAML file or a preset ({', '.join(near)})"


def parse(text: str, *, name: str) -> Tree:
    """The tree of a YAML text; `name` stands for the file in origins and messages.

    Raises:
        SourceError: not YAML, not a mapping, a duplicate key, a tag or an alias that a config has no use for.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"{name}:{mark.line + 1}" if mark else name
        raise SourceError(f"{at}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise SourceError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise SourceError(f"{name}: not valid YAML: nested too deeply") from None
    if node is None:
        raise SourceError(f"{name}: is empty; a config needs at least the sections model and batch")
    if not isinstance(node, yaml.MappingNode):
        raise SourceError(f"{name}:{node.start_mark.line + 1}: a config is a mapping of sections, e.g. model: {{...}}")
    return _Reader(name).tree(node)


def parse_override(text: str) -> Tree:
    """The tree of one `section.key=value`; the value is YAML.

    Raises:
        SourceError: there is no `=`, the key is not a dotted name, or the value is not YAML.
    """
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", key):
        raise SourceError(f"override {text!r} is not key=value; write e.g. mesh.tp=4")
    if value.strip():
        try:
            node = yaml.compose(value, Loader=_Loader)
        except (yaml.YAMLError, RecursionError) as error:
            problem = getattr(error, "problem", None) or "can't be read"
            raise SourceError(f"override {text!r}: the value is not valid YAML: {problem}") from None
        tree = _Reader("override", lines=False).either(node)
    else:
        tree = Leaf(None, "override")
    for part in reversed(key.split(".")):
        tree = {part: tree}
    return tree


def merge(base: Tree, top: Tree) -> Tree:
    """`base` with the values of `top` in place; sections are joined, everything else is replaced."""
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def apply_override(tree: Tree, text: str) -> Tree:
    """`tree` with one override in place.

    Raises:
        SourceError: as `parse_override`, or the key leads into a value that has no keys.
    """
    override = parse_override(text)
    at: Any = tree
    parts = text.partition("=")[0].strip().split(".")
    for depth, part in enumerate(parts[:-1], start=1):
        at = at.get(part, {})
        if isinstance(at, Leaf):
            if at.value is None:
                break
            name = ".".join(parts[:depth])
            raise SourceError(f"override {text!r}: {name}={at.value} has no keys; give the whole value, {name}=...")
    return merge(tree, override)


def plain(tree: Any) -> Any:
    """The values without their origins."""
    return {key: plain(value) for key, value in tree.items()} if isinstance(tree, dict) else tree.value


def leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Leaf]]:
    """(dotted name, leaf) of each leaf."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


class _Loader(yaml.SafeLoader):
    """Composes nodes; scalars are resolved as in YAML 1.2, not 1.1."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 - add_implicit_resolver fills it, as PyYAML wants it


TAG = "tag:yaml.org,2002:"
_Loader.add_implicit_resolver(f"{TAG}null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(f"{TAG}bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    f"{TAG}int", re.compile(r"^(?:[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    f"{TAG}float",
    re.compile(r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN))$"),
    list("-+.0123456789"),
)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 or 1.2 would read as something else."""

    yaml_implicit_resolvers: dict = {  # noqa: RUF012
        first: yaml.SafeDumper.yaml_implicit_resolvers.get(first, []) + _Loader.yaml_implicit_resolvers.get(first, [])
        for first in {**yaml.SafeDumper.yaml_implicit_resolvers, **_Loader.yaml_implicit_resolvers}
    }


def to_yaml(values: dict[str, Any]) -> str:
    """Values as YAML text that `parse` reads back: a section per block, its plain values in one flow mapping."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120)


def _scalar(tag: str, text: str) -> Any:
    match tag.removeprefix(TAG):
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int":
            return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
        case "float":
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        case "str":
            return text
    raise ValueError(f"the tag {tag} is not allowed")


class _Reader:
    """Turns the nodes of one text into a tree."""

    def __init__(self, name: str, lines: bool = True):
        self.name, self.lines, self.num_nodes = name, lines, 0
        self.inside: list[yaml.Node] = []

    def at(self, node: yaml.Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}" if self.lines else self.name

    def either(self, node: yaml.Node) -> Any:
        """A subtree for a mapping, else a leaf."""
        return self.tree(node) if isinstance(node, yaml.MappingNode) else Leaf(self.value(node), self.at(node))

    def tree(self, node: yaml.MappingNode) -> Tree:
        self.count(node)
        self.inside.append(node)
        tree = {key: self.either(value) for key, value in self.pairs(node)}
        self.inside.pop()
        return tree

    def value(self, node: yaml.Node) -> Any:
        """The plain value; mappings inside lists become dicts."""
        self.count(node)
        if isinstance(node, yaml.ScalarNode):
            try:
                return _scalar(node.tag, node.value)
            except ValueError as error:
                raise SourceError(f"{self.at(node)}: {node.value[:60]}: {error}") from None
        self.inside.append(node)
        if isinstance(node, yaml.MappingNode):
            made: Any = {key: self.value(value) for key, value in self.pairs(node)}
        else:
            made = [self.value(value) for value in node.value]
        self.inside.pop()
        return made

    def pairs(self, node: yaml.MappingNode) -> list[tuple[str, yaml.Node]]:
        """Keys and value nodes, each key once."""
        first: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise SourceError(f"{self.at(key)}: a key must be a name")
            if key.value in first:
                line = first[key.value].start_mark.line + 1
                raise SourceError(f"{self.at(key)}: {key.value} is given twice, first in line {line}; remove one")
            first[key.value] = key
        return [(key.value, value) for key, value in node.value]

    def count(self, node: yaml.Node) -> None:
        """Refuse aliases that contain themselves or multiply beyond reason."""
        self.num_nodes += 1
        if any(node is outer for outer in self.inside) or self.num_nodes > MAX_NODES:
            raise SourceError(f"{self.at(node)}: an alias that contains itself, or too many values for a config")
