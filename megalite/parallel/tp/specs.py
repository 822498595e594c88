"""Parts of the usual shardings: which box of a logical tensor this rank of tp holds."""

from megalite.parallel.spec import ParamSpec, Part
from megalite.parallel.tp.rows import TensorParallel


def split(name: str, global_shape: tuple[int, ...], *, dim: int, tp: TensorParallel) -> Part:
    """Rank r's equal share along `dim`."""
    size = global_shape[dim] // tp.size
    assert size * tp.size == global_shape[dim], f"{name}: tp={tp.size} does not divide {global_shape} along {dim}"
    return slab(name, global_shape, dim=dim, start=tp.rank * size, size=size)


def slab(
    name: str,
    global_shape: tuple[int, ...],
    *,
    dim: int,
    start: int,
    size: int,
    num_replicas: int = 1,
    replica: int = 0,
) -> Part:
    """Indices [start, start + size) along `dim`, everything along the others."""
    at = tuple(start if d == dim else 0 for d in range(len(global_shape)))
    shape = tuple(size if d == dim else n for d, n in enumerate(global_shape))
    return Part(name, tuple(global_shape), at, shape, num_replicas, replica)


def whole(name: str, global_shape: tuple[int, ...], *, tp: TensorParallel) -> Part:
    """The whole tensor, on every rank of tp."""
    return slab(name, global_shape, dim=0, start=0, size=global_shape[0], num_replicas=tp.size, replica=tp.rank)


def replicated_reduce(tp: TensorParallel) -> str | None:
    """`tp_reduce` of a replicated parameter that is applied to this rank's rows: partial gradients only if rows are
    sharded."""
    return "tp" if tp.sequence_parallel else None


def local_shape(spec: ParamSpec, *, padding: int = 0) -> tuple[int, ...]:
    """Shape of the local parameter: the parts one below the other, then `padding` rows."""
    return (sum(part.shape[0] for part in spec.parts) + padding, *spec.parts[0].shape[1:])
