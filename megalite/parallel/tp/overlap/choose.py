"""Which overlap backend each pass of each tp linear uses: decided once, when the model is built, and shown as a table.

Invariant: a choice depends on the config and the group's transport, so all ranks of a group agree.
`auto` never fails: it takes `chunked` where the recorded rates say that pieces pay (table.py), else `none`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

import torch

from megalite.config.overlap import Overlap as Wanted
from megalite.parallel.tp.overlap.base import Overlap, Passes
from megalite.parallel.tp.overlap.chunked import Chunked
from megalite.parallel.tp.overlap.none import NO_OVERLAP, PLAIN
from megalite.parallel.tp.overlap.table import RATES, LinearSize, Way, predict
from megalite.parallel.tp.rows import TensorParallel

WAYS: dict[tuple[str, str], Way] = {
    ("column", "forward"): "gather_gemm",
    ("column", "backward"): "dgrad_reduce",
    ("row", "forward"): "gemm_reduce",
    ("row", "backward"): "gather_dgrad",
}
BLOCKING = {"shm": "block: pieces would only add calls", "symm": "use all of the GPU: pieces would only add launches"}
"""Transports under which no GEMM runs, and why."""
PIECES_OVER = {"shm": "gloo", "symm": "nccl"}
"""What pieces travel over where whole collectives have a faster channel."""


@dataclass(frozen=True)
class Linear:
    """A linear of the model: `row_size` elements of a row are gathered or reduced, `local_size` are this rank's."""

    site: str
    kind: str
    """column or row."""
    row_size: int
    local_size: int


@dataclass(frozen=True)
class Choice:
    """One pass of one linear."""

    site: str
    backend: Overlap
    why: str

    @property
    def what(self) -> str:
        """`chunked, 4 pieces` or the backend's name."""
        if not isinstance(self.backend, Chunked):
            return self.backend.name
        num = self.backend.num_chunks
        return f"chunked, {num} piece{'s' if num > 1 else ''}"


@dataclass(frozen=True)
class Choices:
    """The choice for every site; `choices["attention.qkv"]` is that linear's pair of backends."""

    by_site: Mapping[str, Choice] = field(default_factory=dict)
    source: str = ""
    """What `auto` has predicted from, if it has."""
    batch_parts: int = 1
    """Parts of the microbatch that take turns; with more than one no site has a choice."""

    def __getitem__(self, linear: str) -> Passes:
        if not self.by_site:
            return PLAIN
        return Passes(self.by_site[f"{linear}.forward"].backend, self.by_site[f"{linear}.backward"].backend)

    def close(self) -> None:
        """Close every backend, once. Raises: see Overlap."""
        for backend in {id(choice.backend): choice.backend for choice in self.by_site.values()}.values():
            backend.close()

    def table(self) -> str:
        """One line per site: what, and why."""
        if self.batch_parts > 1:
            return (
                f"every site: {self.batch_parts} parts of the batch, whole collectives of one under another's compute"
            )
        choices = self.by_site.values()
        widths = [max(len(choice.site) for choice in choices), max(len(choice.what) for choice in choices)]
        lines = [f"{c.site:<{widths[0]}}  {c.what:<{widths[1]}}  {c.why}" for c in choices]
        return "\n".join([*lines, f"(auto predicts from {self.source})"] if self.source else lines)


NO_CHOICES = Choices()
"""`none` everywhere."""


def choose(
    wanted: Wanted,
    linears: list[Linear],
    *,
    rows: int,
    dtype: torch.dtype,
    tp: TensorParallel,
    transport: str,
    symm: Callable[[], Overlap],
) -> Choices:
    """Decide every pass.

    Args:
        linears:   of a block; all blocks are alike.
        rows:      of a microbatch, over all ranks of tp.
        transport: see transport_of.
        symm:      makes the backend of that name; called at most once, and only if a pass uses it.

    Raises:
        ValueError: what `symm` raises.
    """
    if tp.size == 1:
        return NO_CHOICES
    sizes = {
        f"{linear.site}.{way}": LinearSize(
            WAYS[linear.kind, way],
            rows,
            linear.row_size,
            linear.local_size,
            dtype.itemsize,
            tp.size,
            tp.sequence_parallel,
        )
        for linear in linears
        for way in ("forward", "backward")
    }
    symm = cache(symm)
    made = {site: Choice(site, *_decide(wanted, site, size, transport, symm)) for site, size in sizes.items()}
    predicted = any(wanted.backend_of(site) == "auto" for site in made) and transport in RATES
    return Choices(made, source=RATES[transport].source if predicted else "")


def transport_of(tp: TensorParallel, device: torch.device) -> str:
    """What carries the collectives of a group on tensors of a device: gloo, shm, nccl or symm."""
    if tp.group.local is not None:
        return "shm" if device.type == "cpu" else "symm"
    return "gloo" if device.type == "cpu" else "nccl"


def _decide(
    wanted: Wanted, site: str, size: LinearSize, transport: str, symm: Callable[[], Overlap]
) -> tuple[Overlap, str]:
    """The backend, and the reason."""
    backend = wanted.backend_of(site)
    if not size.sequence_parallel and size.way in ("gather_gemm", "gather_dgrad"):
        return NO_OVERLAP, "nothing is sent without sequence parallel"
    if backend == "none":
        return NO_OVERLAP, "configured"
    if backend == "symm":
        return symm(), "configured"
    if backend == "auto" and transport in BLOCKING:
        return NO_OVERLAP, f"auto: collectives over {transport} {BLOCKING[transport]}"
    found = predict(size, RATES[PIECES_OVER.get(transport, transport)], chunks=wanted.chunks)
    if backend == "chunked":
        return Chunked(found.chunks), "configured"
    times = f"{found.none_s * 1e3:.3g} ms whole, {found.chunked_s * 1e3:.3g} ms in pieces"
    return (Chunked(found.chunks), f"auto: {times}") if found.pays else (NO_OVERLAP, f"auto: pieces don't pay, {times}")
