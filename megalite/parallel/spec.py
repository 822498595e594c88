"""What a parameter is, apart from its values: its logical tensors, its sharding, how its gradient is summed.

Every `nn.Parameter` of a megalite model carries `.spec`, set by the layer that makes it. Initialisation, ZeRO,
clipping, the optimizer and checkpoints read only the spec, so no other part guesses from names or shapes.

A local parameter is the concatenation along dim 0 of `parts`; each part is a box of one *logical* tensor, the tensor
that one device without fusing or padding would hold. Rows after the last part are padding: zero, and never saved.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Kind = Literal["linear", "embedding", "norm", "bias"]


@dataclass(frozen=True)
class Part:
    """A box of a logical tensor that lies in a local parameter.

    `name` is the logical name, e.g. `layers.3.attention.q.weight`; `start` and `shape` are the box in the logical
    tensor of shape `global_shape`. The box fills `shape[0]` rows of the local parameter, after the rows of earlier
    parts.
    """

    name: str
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    num_replicas: int = 1
    """Ranks of the tp group that hold this same box (tp for norms; tp / kv heads for replicated kv heads)."""
    replica: int = 0
    """Index of this rank among them; only replica 0 counts in norms and is saved."""
    frozen: bool = False
    """Never updated or decayed, without a share in norms; saved like any other."""


@dataclass(frozen=True)
class ParamSpec:
    """Everything but the values of one local parameter.

    `tp_reduce` names the mesh group over which the gradients of *all* parts with num_replicas > 1 must still be summed
    after backward, once per step: "tp" (sequence parallel norms and row biases), "kv" (replicated kv heads), or None
    when each replica already holds the whole gradient.
    """

    parts: tuple[Part, ...]
    kind: Kind
    init: Literal["normal", "zeros", "ones"] = "normal"
    init_std: float = 0.02
    tp_reduce: Literal["tp", "kv"] | None = None
    tied: bool = False
    """True on the word embedding of a model with tied embeddings, on every stage that holds a copy."""
    tied_copy: bool = False
    """True on the head's copy: not counted in norms, not saved."""


@dataclass(frozen=True)
class Piece:
    """A run of one part's elements that this rank owns: [offset, offset + len(data)) of the box in row-major order.

    `data` is a 1-D view of the owner's storage: savers read it, loaders write it.
    """

    part: Part
    offset: int
    data: Tensor
