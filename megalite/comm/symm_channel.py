"""Collectives between GPUs that reach each other's memory, by our own kernels over a symmetric heap (csrc/symm_*.cu).

Invariant: sums are taken in fp32 in rank order and rounded once, so all ranks hold the same bits (through the switch,
multimem, the order is its own, but one sum serves all ranks). Calls are ordered by the stream and wait for peers on the
GPU; a peer that does not come in time leaves NaN in the result, and the next call raises. Reference: the two-buffer
protocol of csrc/include/exchange.cuh, explored in tests/protocols/.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from megalite import native
from megalite.comm.heap_layout import SymmetricBuffer
from megalite.comm.symmetric import Heap

Op = Literal["sum", "max", "min"]
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
REDUCTIONS = {"sum": 0, "max": 1, "min": 2}
BUFFER_BYTES = 16 * 2**20
"""Of each of a rank's two buffers; longer messages go through it in pieces."""
MAX_RANKS = 16
TRIP_BYTES = 1_500_000
"""What a link carries in the time of one more round of flags: about 4 us at 370 GB/s. A model, not a measurement."""
MULTIMEM_RANKS = 4
"""From here on a link carries clearly less through the switch: 1 + 1/W tensors instead of 2 (W-1)/W."""
_STATE, _RANK, _BLOCK, _PEER, _EXPECTED, _GOT, _WORDS = range(7)


class Kernels(Protocol):
    """The functions of the extension that are used here; addresses are integers."""

    SYMM_FLAG_COLUMNS: int

    def symm_team(self, **fields: Any) -> Any: ...
    def symm_all_reduce(self, team: Any, kind: str, x: int, out: int, *numbers: int) -> None: ...
    def symm_all_gather(self, team: Any, shard: int, out: int, *numbers: int) -> None: ...
    def symm_reduce_scatter(self, team: Any, full: int, out: int, *numbers: int) -> None: ...
    def symm_broadcast(self, team: Any, data: int, *numbers: int) -> None: ...
    def symm_barrier(self, team: Any, stream: int) -> None: ...


def symm_channel_missing(device: torch.device) -> str | None:
    """Why the kernels can't run on this rank, or None."""
    if device.type != "cuda":
        return f"our collectives between GPUs are CUDA kernels, this rank is on {device.type}"
    if native.load() is None:
        return f"the compiled extension is missing: {native.why_missing()}"
    return None if hasattr(native.load(), "symm_team") else "the extension was built without nvcc"


def one_shot_limit(size: int) -> float:
    """Bytes up to which sending everything to everybody is faster than a second trip, on `size` ranks."""
    surplus = (size - 1) * (1 - 2 / size)  # tensors on the link more than two-shot
    return TRIP_BYTES / surplus if surplus else float("inf")


class SymmChannel:
    """One rank's end; collective calls come in the same order on all ranks, as with any transport.

    Args:
        ranks:     global numbers of the heap's ranks, for messages.
        timeout_s: limit of one wait for one peer.
        kernels:   stands in for the extension in tests.

    Memory: two buffers of `buffer_bytes` per rank, from the heap; collective, like the heap's allocate.
    """

    def __init__(
        self,
        heap: Heap,
        *,
        ranks: tuple[int, ...],
        timeout_s: float,
        buffer_bytes: int = BUFFER_BYTES,
        kernels: Kernels | None = None,
    ):
        assert len(ranks) == heap.size
        if heap.size > MAX_RANKS:
            raise ValueError(f"our collectives take up to {MAX_RANKS} ranks, the group has {heap.size}")
        self._kernels = kernels or native.load()
        self._device = heap.device
        self._ranks = ranks
        self._timeout_s = timeout_s
        columns = self._kernels.SYMM_FLAG_COLUMNS
        self._buffer = heap.allocate((buffer_bytes,), torch.uint8, num_buffers=2, num_flags=columns)
        # pinned, so that a kernel can write it and the host can look at it without waiting for the GPU
        self._error = torch.zeros(_WORDS, dtype=torch.int32, pin_memory=heap.device.type == "cuda")
        self._words = self._error.numpy()
        self._team = self._make_team(self._buffer, columns, buffer_bytes)
        self._multimem = bool(self._buffer.multicast) and _has_multimem(heap.device)
        self._stream: Any = None

    def _make_team(self, buffer: SymmetricBuffer, columns: int, buffer_bytes: int) -> Any:
        return self._kernels.symm_team(
            rank=buffer.rank,
            row_flags=columns,
            buffer_bytes=buffer_bytes,
            timeout_s=self._timeout_s,
            error=self._error.data_ptr(),
            buffers=[tensor.data_ptr() for row in buffer.peers for tensor in row],
            multicast=list(buffer.multicast) or [0, 0],
            flags=[flags.data_ptr() for flags in buffer.peer_flags],
        )

    def takes(self, *tensors: Tensor) -> bool:
        """Whether the kernels can work on them; the others go through the process group."""
        return all(t.dtype in FORMATS and t.device.type == self._device.type and t.is_contiguous() for t in tensors)

    def kind(self, num_bytes: int, op: Op) -> str:
        """Which all-reduce such a tensor gets: one_shot, two_shot or multimem; the same on all ranks."""
        size = self._buffer.size
        if num_bytes <= one_shot_limit(size):
            return "one_shot"
        return "multimem" if self._multimem and op == "sum" and size >= MULTIMEM_RANKS else "two_shot"

    def all_reduce(self, tensor: Tensor, op: Op = "sum", *, kind: str | None = None) -> None:
        """Reduce in place.

        Args:
            kind: instead of the one that `kind()` names, e.g. to compare them.

        Communication: sends (W-1), 2 (W-1)/W or, through the switch, 1 + 1/W times the tensor's bytes.
        """
        with self._ready() as stream:
            kind, at = kind or self.kind(tensor.nbytes, op), tensor.data_ptr()
            numbers = (tensor.numel(), FORMATS[tensor.dtype], REDUCTIONS[op], stream)
            self._kernels.symm_all_reduce(self._team, kind, at, at, *numbers)

    def all_gather(self, out: Tensor, shard: Tensor) -> None:
        """Concatenate the shards along dim 0 into `out`; `shard` may lie in its place there.

        Communication: sends (W-1) times the shard's bytes.
        """
        with self._ready() as stream:
            numbers = (shard.numel(), FORMATS[shard.dtype], stream)
            self._kernels.symm_all_gather(self._team, shard.data_ptr(), out.data_ptr(), *numbers)

    def reduce_scatter(self, out: Tensor, full: Tensor) -> None:
        """Rank r receives part r of the sum in `out`, which may lie in its place in `full`.

        Communication: sends (W-1)/W of `full`'s bytes.
        """
        with self._ready() as stream:
            numbers = (out.numel(), FORMATS[out.dtype], stream)
            self._kernels.symm_reduce_scatter(self._team, full.data_ptr(), out.data_ptr(), *numbers)

    def begin_reduce_scatter(self, out: Tensor, full: Tensor) -> None:
        """All of it: it is in the stream's order, and blocks nobody here."""
        self.reduce_scatter(out, full)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Copy the tensor of the group's rank `root` to all.

        Communication: the root sends (W-1) times the tensor's bytes.
        """
        with self._ready() as stream:
            numbers = (tensor.numel(), root, FORMATS[tensor.dtype], stream)
            self._kernels.symm_broadcast(self._team, tensor.data_ptr(), *numbers)

    def barrier(self) -> None:
        """Return when all ranks' earlier work on the GPU is done."""
        with self._ready() as stream:
            self._kernels.symm_barrier(self._team, stream)
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for all calls so far.

        Raises:
            RuntimeError: a peer did not come to one of them in time.
        """
        if self._stream is not None:
            self._stream.synchronize()
        self._raise_failure()

    def _ready(self) -> AbstractContextManager[int]:
        """Look for a failure, then the stream's address: calls on another stream come behind those on the last one."""
        self._raise_failure()
        if self._device.type != "cuda":
            return nullcontext(0)
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream
        return _OnDevice(self._device, stream.cuda_stream)

    def _raise_failure(self) -> None:
        if self._words[_STATE] != 2:
            return
        rank, block, peer, expected, got = (int(word) for word in self._words[_RANK:_WORDS])
        raise RuntimeError(
            f"rank {self._ranks[peer]} did not come to a collective within {self._timeout_s:g} s: block {block} of "
            f"rank {self._ranks[rank]} waited for its step {expected % 2**32}, it has reported {got % 2**32}; look at "
            "that rank's own error first"
        )


class _OnDevice(AbstractContextManager[int]):
    """The device is current inside; gives the stream's address."""

    def __init__(self, device: torch.device, stream: int):
        self._guard = torch.cuda.device(device)
        self._address = stream

    def __enter__(self) -> int:
        self._guard.__enter__()
        return self._address

    def __exit__(self, *error: Any) -> None:
        self._guard.__exit__(*error)


def _has_multimem(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
