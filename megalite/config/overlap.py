"""The section `overlap`: how the collectives of tp linears run under their GEMMs, in general and per site.

A site is one linear's pass, `attention.qkv.forward`; both dots and nesting may name it, so that overrides can.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from megalite.config.fields import Positive, Section
from megalite.config.presets import near_names

Backend = Literal["auto", "none", "chunked", "symm"]

_WIDE = {"swiglu": "mlp.gate_up", "gelu": "mlp.up"}


def overlap_sites(activation: str, *, gathers: bool = True) -> tuple[str, ...]:
    """The sites of a model in the order of a block; without `gathers`, those that send without sequence parallel."""
    reducing = ("attention.qkv.backward", "attention.out.forward", f"{_WIDE[activation]}.backward", "mlp.down.forward")
    linears = ("attention.qkv", "attention.out", _WIDE[activation], "mlp.down")
    names = (f"{linear}.{way}" for linear in linears for way in ("forward", "backward"))
    return tuple(name for name in names if gathers or name in reducing)


def _dotted(value: Any, prefix: str = "") -> Any:
    """{attention: {qkv: {forward: none}}} means {attention.qkv.forward: none}; of two that mean the same, the later."""
    if not isinstance(value, dict):
        return value
    flat: dict[str, Any] = {}
    for key, below in value.items():
        name = f"{prefix}{key}"
        flat |= _dotted(below, f"{name}.") if isinstance(below, dict) and below else {name: below}
    return flat


def _auto(value: Any) -> Any:
    return None if value == "auto" else value


class Overlap(Section):
    """Tensor parallel communication under computation."""

    backend: Backend = "auto"
    """none: whole collectives before or after whole GEMMs. chunked: in pieces, each under the GEMM of another piece.
    symm: one kernel over memory that all ranks of tp can address. auto: none or chunked, by what a table of measured
    and modelled rates predicts for the shapes at hand."""
    chunks: Annotated[Positive | None, BeforeValidator(_auto)] = None
    """Of chunked: pieces in which each rank's share of the rows travels. Default (or auto): by the same table."""
    sites: Annotated[dict[str, Backend], BeforeValidator(_dotted)] = {}  # noqa: RUF012 - pydantic copies it
    """Exceptions from `backend`, e.g. {attention.qkv.forward: none, mlp.down.backward: chunked}."""

    def backend_of(self, site: str) -> Backend:
        """What is wanted for a site."""
        return self.sites.get(site, self.backend)


def overlap_problems(
    overlap: Overlap, *, activation: str, tp: int, sequence_parallel: bool, rows: int | None
) -> Iterator[str]:
    """What is wrong with a section at tp > 1.

    Args:
        rows: of a microbatch, None when it is not known.
    """
    known, sending = overlap_sites(activation), overlap_sites(activation, gathers=sequence_parallel)
    for site, backend in overlap.sites.items():
        if site not in known:
            near = near_names(site, list(known))
            hint = f"did you mean {near[0]}?" if near else f"its sites are {', '.join(known)}"
            yield f"overlap.sites.{site}={backend} names no site of model.activation={activation}; {hint}"
        elif site not in sending and backend not in ("auto", "none"):
            yield (
                f"overlap.sites.{site}={backend} has no effect with mesh.sequence_parallel=false, where it sends "
                "nothing; leave it out"
            )
    yield from _chunks(overlap, sending, tp=tp, rows=rows)


def _chunks(overlap: Overlap, sending: tuple[str, ...], *, tp: int, rows: int | None) -> Iterator[str]:
    if overlap.chunks is None:
        return
    if not any(overlap.backend_of(site) in ("auto", "chunked") for site in sending):
        yield (
            f"overlap.chunks={overlap.chunks} has no effect with overlap.backend={overlap.backend} and no site that is "
            "chunked or auto; leave it out, or use overlap.backend=chunked"
        )
    if rows is not None and overlap.chunks > max(1, rows // tp):
        yield (
            f"overlap.chunks={overlap.chunks} is more than the {rows // tp} rows of a rank's share "
            f"(batch.micro_batch_size * batch.seq_len = {rows} rows, mesh.tp={tp}); use {max(1, rows // tp)} or less, "
            "or auto"
        )
