"""What a config is after loading: every value with its origin, the sizes that follow, and the JSON schema."""

from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megalite.config.load import Loaded
from megalite.config.rules import shown
from megalite.config.schema import FAMILY_DEFAULTS, Config

FOLLOWS = {
    "model.num_kv_heads": "model.num_heads",
    "model.head_dim": "model.hidden_size / model.num_heads",
    "model.ffn_size": "model.family and model.hidden_size",
    "batch.global_batch_size": "micro_batch_size * num_microbatches * dp",
    "batch.micro_batch_size": "global_batch_size / (num_microbatches * dp)",
    "batch.num_microbatches": "global_batch_size / (micro_batch_size * dp)",
    "batch.seq_len": "model.max_seq_len",
    "zero.reduce_each": "zero.stage",
} | {f"model.{name}": "model.family" for name in FAMILY_DEFAULTS["gpt"]}
"""Fields that are filled when they are left out, and what they follow from."""

SIZES = (
    "world_size",
    "dp",
    "dp_replicate",
    "dp_shard",
    "num_stages",
    "stage_layers",
    "sequence_parallel",
    "kv_replicas",
    "padded_vocab",
)


def rows(loaded: Loaded) -> Iterator[tuple[str, str, str]]:
    """(name, value, origin) of each field, then of each size that follows from several sections."""
    for name, value in _fields(loaded.config):
        yield name, shown(value), origin(name, loaded.origins)
    for name in SIZES:
        yield name, shown(getattr(loaded.config, name)), "derived"


def _fields(config: Config) -> Iterator[tuple[str, object]]:
    for name in type(config).model_fields:
        section = getattr(config, name)
        if isinstance(section, str | tuple):
            yield name, section
        else:
            yield from ((f"{name}.{field}", getattr(section, field)) for field in type(section).model_fields)


def origin(name: str, origins: Mapping[str, str]) -> str:
    """Where a value is from: `file:line`, `override`, `follows from ...` or `default`."""
    given = dict.fromkeys(at for key, at in origins.items() if key == name or key.startswith(f"{name}."))
    if given:
        return ", ".join(given)
    return f"follows from {FOLLOWS[name]}" if name in FOLLOWS else "default"


def show(loaded: Loaded, *, width: int | None = None) -> str:
    """The rows as text: a table when `width` (of a terminal) is given, else one `name = value  # origin` per line."""
    if width is None:
        return "\n".join(f"{name} = {value}  # {at}" for name, value, at in rows(loaded))
    table = Table(row_styles=["", "dim"])
    for head in ("name", "value", "from"):
        table.add_column(head, overflow="fold")
    for row in rows(loaded):
        table.add_row(*map(Text, row))
    console = Console(width=width, force_terminal=True)
    with console.capture() as captured:
        console.print(table)
    return captured.get().rstrip()
