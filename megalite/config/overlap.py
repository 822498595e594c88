"""The section `overlap`: how the collectives of tp linears run under their GEMMs, in general and per site.

A site is one linear's pass, `attention.qkv.forward`; both dots and nesting may name it, so that overrides can.
With batch parts nothing is decided per site: every linear's collective runs under the computation of the other parts.
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
    """none: whole collectives before or after whole GEMMs. chunked: in parts, each under the computation of another:
    parts of the microbatch (batch_parts), or of a linear's rows (chunks). symm: one kernel over memory that all ranks
    of tp can address. auto: none or chunked rows, by what a table of measured and modelled rates predicts for the
    shapes at hand."""
    chunks: Annotated[Positive | None, BeforeValidator(_auto)] = None
    """Of chunked: pieces in which each rank's share of a linear's rows travels, each under the GEMM of another piece.
    Default (or auto): by the same table."""
    batch_parts: Annotated[Positive | None, BeforeValidator(_auto)] = None
    """Of chunked: parts of a microbatch's sequences that take turns, so that one part's collectives run under all of
    another part's computation; 1: none. Default (or auto): with backend=chunked and neither chunks nor sites 4 or 2,
    whichever divides micro_batch_size first, else 1."""
    sites: Annotated[dict[str, Backend], BeforeValidator(_dotted)] = {}  # noqa: RUF012 - pydantic copies it
    """Exceptions from `backend`, e.g. {attention.qkv.forward: none, mlp.down.backward: chunked}."""

    def backend_of(self, site: str) -> Backend:
        """What is wanted for a site."""
        return self.sites.get(site, self.backend)

    def num_batch_parts(self, *, samples: int, seq_len: int, split_rows: int) -> int:
        """Parts of a microbatch of that many sequences.

        Args:
            split_rows: ranks that share the rows between tp layers, thus tp with sequence parallel, else 1.
        """
        if self.batch_parts is not None:
            return self.batch_parts
        plain = self.backend == "chunked" and self.chunks is None and not self.sites
        fits = (num for num in (4, 2) if samples % num == 0 and samples // num * seq_len % split_rows == 0)
        return next(fits, 1) if plain else 1


def overlap_problems(
    overlap: Overlap, *, activation: str, tp: int, sequence_parallel: bool, samples: int | None, seq_len: int
) -> Iterator[str]:
    """What is wrong with a section at tp > 1.

    Args:
        samples: of a microbatch, None when it is not known.
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
    yield from _chunks(overlap, sending, tp=tp, rows=samples * seq_len if samples else None)
    if (overlap.batch_parts or 1) > 1:
        yield from _batch_parts(overlap, split_rows=tp if sequence_parallel else 1, samples=samples, seq_len=seq_len)


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


def _batch_parts(overlap: Overlap, *, split_rows: int, samples: int | None, seq_len: int) -> Iterator[str]:
    told, num = f"overlap.batch_parts={overlap.batch_parts}", overlap.batch_parts
    if overlap.backend != "chunked":
        yield f"{told} needs overlap.backend=chunked, but it is {overlap.backend}; set that, or leave batch_parts out"
    for name in ("chunks", "sites"):
        if getattr(overlap, name):
            yield f"overlap.{name} has no effect with {told}, which runs whole collectives; leave one of them out"
    if samples is not None and samples % num:
        yield f"{told} does not divide batch.micro_batch_size={samples}; use a divisor of it, or 1"
    elif samples is not None and samples // num * seq_len % split_rows:
        yield (
            f"{told}: the {samples // num * seq_len} rows of a part are not divisible by mesh.tp={split_rows}; use "
            "fewer parts, or mesh.sequence_parallel=false"
        )
