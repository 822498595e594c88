"""What is computed again in backward, per block: the words none, selective and full, or a list of ranges of blocks.

Ops: `attention` is the attention core (scores, softmax, mix), `activation` the one between the MLP's matrices, `mlp`
the whole MLP from its input, `full` the whole block. selective stands for attention and activation. Blocks that no
range names keep everything.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Tag

from megalite.config.fields import NonNegative, Section

SELECTIVE = ("attention", "activation")
WORDS = {"none": frozenset(), "selective": frozenset(SELECTIVE), "full": frozenset({"full"})}
TAGS = ("word", "ranges")
"""Names of the two forms, which pydantic puts into error locations."""


def _as_list(value: Any) -> Any:
    """One op may stand without brackets; selective stands for two."""
    if isinstance(value, str):
        return SELECTIVE if value == "selective" else (value,)
    return value


class RecomputeRange(Section):
    """What a range of blocks computes again."""

    layers: tuple[NonNegative, NonNegative]
    """First block, and the last + 1."""
    ops: Annotated[tuple[Literal["attention", "activation", "mlp", "full"], ...], BeforeValidator(_as_list)]
    """A list of attention, activation and mlp; or full; or selective, which is [attention, activation]."""


def _form(value: Any) -> str:
    return "ranges" if isinstance(value, list | tuple) else "word"


Recompute = Annotated[
    Annotated[Literal["none", "selective", "full"], Tag("word")] | Annotated[tuple[RecomputeRange, ...], Tag("ranges")],
    Discriminator(_form),
]


def recompute_ops(recompute: Recompute, layer: int) -> frozenset[str]:
    """The ops that block `layer` computes again."""
    if isinstance(recompute, str):
        return WORDS[recompute]
    return next((frozenset(r.ops) for r in recompute if r.layers[0] <= layer < r.layers[1]), frozenset())


def recompute_problems(recompute: Recompute, num_layers: int) -> Iterator[str]:
    """What is wrong with a list of ranges."""
    if isinstance(recompute, str):
        return
    if not recompute:
        yield "recompute=[] names no blocks; use recompute=none"
    for index, one in enumerate(recompute):
        yield from _layers(f"recompute[{index}].layers=[{one.layers[0]}, {one.layers[1]}]", one.layers, num_layers)
        yield from _ops(f"recompute[{index}].ops=[{', '.join(one.ops)}]", one.ops)
        for before, other in enumerate(recompute[:index]):
            low, high = max(one.layers[0], other.layers[0]), min(one.layers[1], other.layers[1])
            if low < high:
                yield (
                    f"recompute[{before}].layers=[{other.layers[0]}, {other.layers[1]}] and recompute[{index}].layers="
                    f"[{one.layers[0]}, {one.layers[1]}] both name block {low}; let each block be in one range"
                )


def _layers(name: str, layers: tuple[int, int], num_layers: int) -> Iterator[str]:
    first, end = layers
    if first >= end:
        yield f"{name} is empty: the second number is the last block + 1; use e.g. [{first}, {first + 1}]"
    elif end > num_layers:
        yield f"{name} ends after model.num_layers={num_layers}; use at most {num_layers} as the second number"


def _ops(name: str, ops: tuple[str, ...]) -> Iterator[str]:
    if not ops:
        yield f"{name} names no op; leave the range out, or use attention, activation, mlp or full"
    elif len(set(ops)) < len(ops):
        yield f"{name} names an op twice; use each once"
    elif "full" in ops and len(ops) > 1:
        yield f"{name}: full is the whole block, the others with it; use full alone"
    elif {"mlp", "activation"} <= set(ops):
        yield f"{name}: mlp computes the activation again with the rest; use one of the two"
