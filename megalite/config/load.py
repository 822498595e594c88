"""From a file and overrides to a `Config`, or to one error that lists every problem; and back to YAML."""

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megalite.config.errors import ConfigError, error_path, field_problems, with_origins
from megalite.config.presets import find_config
from megalite.config.rules import problems
from megalite.config.schema import Config
from megalite.config.source import SourceError, Tree, apply_override, leaves, plain, read_file, to_yaml


@dataclass(frozen=True)
class Loaded:
    """A config and where its values were given: dotted name -> `file:line` or `override`."""

    config: Config
    origins: dict[str, str]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a config file or a preset, apply `key=value` overrides, and check everything.

    Args:
        path: a YAML file, or the name of a shipped preset.
        overrides: e.g. `mesh.tp=4`, `data.train=[{path: x}]`; later ones win.

    Raises:
        ConfigError: with every problem, each with field, value, rule and a way out.
    """
    return load(path, overrides).config


def load(path: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """As `load_config`, with the origin of each value."""
    try:
        tree = read_file(find_config(str(path)))
    except SourceError as error:
        raise ConfigError([str(error)]) from None
    tree, refused = _apply(tree, overrides)
    found = dict(leaves(tree))
    config = check(plain(tree), {name: leaf.origin for name, leaf in found.items()}, name=str(path), found=refused)
    # a value given as null is the same as one left out
    return Loaded(config, {name: leaf.origin for name, leaf in found.items() if leaf.value is not None})


def _apply(tree: Tree, overrides: Sequence[str]) -> tuple[Tree, list[str]]:
    refused = []
    for text in overrides:
        try:
            tree = apply_override(tree, text)
        except SourceError as error:
            refused.append(str(error))
    return tree, refused


def check(values: dict[str, Any], given: dict[str, str], *, name: str, found: Sequence[str] = ()) -> Config:
    """Build the config of `values` and apply every rule.

    Args:
        values: sections as plain dicts.
        given: origins, for the messages.
        name: what is read, for the message.
        found: problems known already; they are reported with the others.

    Raises:
        ConfigError: with every problem.
    """
    found = list(found)
    refused: list[tuple[str | int, ...]] = []
    try:
        config: Config | None = Config.model_validate(values)
    except ValidationError as error:
        found += field_problems(error, given)
        items = error.errors(include_url=False)
        config = _without(values, [error_path(item["loc"]) for item in items])
        refused = [error_path(item["loc"]) for item in items if item["type"] != "extra_forbidden"]
    if config is not None:
        about = [re.compile(rf"\b{re.escape(_subject(path))}") for path in refused]
        rules = [text for text in problems(config) if not any(subject.search(text) for subject in about)]
        found += [with_origins(text, given) for text in rules]
    if found or config is None:
        raise ConfigError(found, name=name)
    return config


def _without(values: dict[str, Any], refused: list[tuple[str | int, ...]]) -> Config | None:
    """The config without the refused values, to find further problems; None when it can't be built."""
    values = copy.deepcopy(values)
    for path in refused:
        parent: Any = values
        for part in path[:-1]:
            below = parent.get(part) if isinstance(part, str) else None
            if not isinstance(below, dict):
                path = path[: path.index(part) + 1]
                break
            parent = below
        parent.pop(path[-1], None)
    try:
        return Config.model_validate(values)
    except ValidationError:
        return None


def _subject(path: tuple[str | int, ...]) -> str:
    """What rules must not speak of when the value at `path` was refused: they would speak of its default."""
    if len(path) == 1 or path[:2] == ("model", "family"):
        return f"{path[0]}."
    return f"{path[0]}.{path[1]}"


def dump(config: Config) -> str:
    """The config as YAML, every value spelled out; loading it gives an equal config."""
    return to_yaml(config.model_dump(mode="json"))
