"""Problems of a config as text: field, value, rule and a way out, all of them at once.

What a field takes is read from the JSON schema of `Config`, so messages can't differ from the rules on the fields.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import ValidationError

from megalite.config.presets import near_names
from megalite.config.recompute import TAGS
from megalite.config.rules import shown
from megalite.config.schema import Config

UNION_TAGS = ("size", "split")
"""Tags of the two forms of mesh.dp; pydantic puts them into error locations."""
BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}


class ConfigError(ValueError):
    """Everything that is wrong with a config, one line per problem."""

    def __init__(self, problems: list[str], *, name: str = ""):
        self.problems = problems
        head = f"{name}: {len(problems)} problems\n  " if len(problems) > 1 else ""
        super().__init__(head + "\n  ".join(problems))


@cache
def json_schema() -> dict[str, Any]:
    """The JSON schema of a config."""
    return Config.model_json_schema()


def field_problems(error: ValidationError, origins: Mapping[str, str]) -> list[str]:
    """One message for each field that pydantic refused."""
    found: dict[tuple, str] = {}
    for item in error.errors(include_url=False):
        path = error_path(item["loc"])
        if isinstance(path[-1], int) and item["type"] == "missing":  # a fixed-length list is too short: about the list
            item, path = {"type": "too_short", "input": item["input"]}, path[:-1]
        found.setdefault(path, _message(path, item["type"], item["input"]) + origin_note(dotted(path), origins))
    return list(found.values())


def error_path(loc: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Pydantic's location without the tags of unions."""
    if loc[:1] == ("recompute",) and len(loc) > 1 and loc[1] in TAGS:
        return loc[:1] + loc[2:]
    tagged = loc[:2] == ("mesh", "dp") and len(loc) > 2 and loc[2] in UNION_TAGS
    return loc[:2] + loc[3:] if tagged else loc


def dotted(path: tuple[str | int, ...]) -> str:
    """`data.train[0].path`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def origin_note(name: str, origins: Mapping[str, str]) -> str:
    """` (file.yaml:3)` when the field or what holds it was given somewhere."""
    name = re.sub(r"\[\d+\].*", "", name)
    while name and name not in origins:
        name = name.rpartition(".")[0]
    return f" ({origins[name]})" if name else ""


def with_origins(problem: str, origins: Mapping[str, str]) -> str:
    """A message of `rules.problems` and where each of the fields in it was given."""
    fields = dict.fromkeys(re.findall(r"\b([a-z_]+(?:\.[a-z_]+)+)=", problem.partition(";")[0]))
    given = [f"{name} {origins[name]}" for name in fields if name in origins]
    return f"{problem} ({', '.join(given)})" if given else problem


def _message(path: tuple[str | int, ...], kind: str, value: Any) -> str:
    name = dotted(path)
    if kind == "extra_forbidden":
        return f"{name} is unknown; {_near(path)}"
    schema = _schema_at(path)
    if kind == "missing":
        return f"{name} is missing; give {expected(schema)}: {schema.get('description', '').rstrip('.')}"
    text = shown(value) if value != "" else "''"
    text = text if len(text) <= 80 else f"{text[:77]}..."
    if isinstance(path[-1], int) and "default" not in schema:  # an element of a list: show the whole default list
        schema = schema | {"default": _schema_at(path[:-1]).get("default")}
    return f"{name}={text} must be {expected(schema)}; {_way_out(schema, value)}"


def _near(path: tuple[str | int, ...]) -> str:
    """A hint for an unknown key: names in its section that look like it, else the same name elsewhere."""
    key, section = str(path[-1]), path[:-1]
    prefix = f"{dotted(section)}." if section else ""
    known = list(_properties(_schema_at(section)))
    if key.replace(".", "") != key:
        return f"write the parts of {key} as nested keys"
    elsewhere = [f"{s}.{f}" for s, node in _properties(json_schema()).items() for f in _properties(node) if f == key]
    near = [prefix + name for name in near_names(key, known)] + elsewhere
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"{f'{dotted(section)} has' if section else 'a config has'} {', '.join(known)}"


def _way_out(schema: dict[str, Any], value: Any) -> str:
    choices = [str(choice) for form in _forms(schema) for choice in form.get("enum", [])]
    near = near_names(str(value), choices)
    if near:
        return f"did you mean {near[0]}?"
    default = schema.get("default")
    if default is not None:
        return f"use e.g. {shown(default)} (the default)"
    if "default" in schema:
        return "leave it out for what follows from other fields"
    for form in _forms(schema):
        if form.get("exclusiveMinimum") == 0:
            return "use 1 or more" if form["type"] == "integer" else "use e.g. 1.0"
    return f"give {expected(schema)}"


def expected(schema: dict[str, Any]) -> str:
    """What a field takes, in words."""
    return " or ".join(dict.fromkeys(_expected_form(form) for form in _forms(schema)))


def _expected_form(form: dict[str, Any]) -> str:
    if "enum" in form or "const" in form:
        words = [shown(v) for v in form.get("enum", [form.get("const")])]
        return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]
    match form.get("type"):
        case "integer" | "number":
            noun = "a whole number" if form["type"] == "integer" else "a number"
            bounds = " and ".join(f"{sign} {form[key]:g}" for key, sign in BOUNDS.items() if key in form)
            return f"{noun} {bounds}".rstrip()
        case "boolean":
            return "true or false"
        case "string":
            return "a text"
        case "array":
            parts = form.get("prefixItems")
            length = f" of {len(parts)}" if parts else ""
            return f"a list{length}, each {expected(parts[0] if parts else form['items'])}"
        case "object" if isinstance(values := form.get("additionalProperties"), dict):
            return f"a mapping of names, each to {expected(values)}"
    return f"a mapping with the keys {', '.join(form.get('properties', {}))}"


def _forms(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The alternatives of a field without null, references followed."""
    if "$ref" in schema:
        return _forms(json_schema()["$defs"][schema["$ref"].rpartition("/")[2]])
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if alternatives is None:
        return [] if schema.get("type") == "null" else [schema]
    return [form for alternative in alternatives for form in _forms(alternative)]


def _properties(schema: dict[str, Any]) -> dict[str, Any]:
    return {name: field for form in _forms(schema) for name, field in form.get("properties", {}).items()}


def _any_key(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of every value of a mapping whose keys are free."""
    return next(values for form in _forms(schema) if isinstance(values := form.get("additionalProperties"), dict))


def _schema_at(path: tuple[str | int, ...]) -> dict[str, Any]:
    """The JSON schema of a field, by its path."""
    schema = json_schema()
    for part in path:
        if isinstance(part, str):
            schema = _properties(schema).get(part) or _any_key(schema)
        else:
            form = next(form for form in _forms(schema) if form.get("type") == "array")
            parts = form.get("prefixItems")
            schema = parts[min(part, len(parts) - 1)] if parts else form["items"]
    return schema
