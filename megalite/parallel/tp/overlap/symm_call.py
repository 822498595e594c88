"""A symmetric buffer with all that one kind of call needs, and the copies that carry rows to the peers.

Invariant: every rank makes the same calls on the same channels in the same order, so that a call's number and its
buffer agree. See [Note: one call] and [Note: who may spin] in kernels/signals/peers.py.
"""

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from megalite import native
from megalite.comm.symmetric import Heap
from megalite.kernels.signals import READY, Failures, Peers, spin_limit

NUM_BUFFERS = 2


@dataclass(frozen=True)
class Setting:
    """What all channels of one rank share. `signals` is kernels/signals/triton_impl.py."""

    heap: Heap
    signals: ModuleType
    failures: Failures
    timeout_s: float
    share: int = 1


class Channel:
    """A symmetric buffer for calls of one shape; collective when it is made.

    Memory: two tensors of `shape` per rank that peers address, and one of `staging` that they don't.
    """

    def __init__(
        self, setting: Setting, shape: tuple[int, ...], dtype: torch.dtype, *, staging: tuple[int, ...] | None = None
    ):
        heap, self.setting = setting.heap, setting
        torch.get_device_module(heap.device).synchronize()  # an allocation may wait for kernels that wait for peers
        self.buffer = heap.allocate(shape, dtype, num_buffers=NUM_BUFFERS)
        self.staging = None if staging is None else torch.empty(staging, dtype=dtype, device=heap.device)
        self.peers = Peers(
            rank=heap.rank,
            size=heap.size,
            flags=self.buffer.flags,
            flag_pointers=self.buffer.flag_pointers,
            epoch=self.buffer.epoch,
            counters=torch.zeros(heap.size + 1, dtype=torch.int32, device=heap.device),
            errors=setting.failures.errors,
            used=self.buffer.epoch.repeat(NUM_BUFFERS),
            limit=spin_limit(setting.timeout_s, heap.device),
            share=setting.share,
        )
        self._calls = 0

    def begin(self) -> int:
        """Start a call; the index of its buffer, which peers have read.

        Raises:
            RuntimeError: an earlier wait gave up.
        """
        self.setting.failures.check()
        index = self._calls % NUM_BUFFERS
        self._calls += 1
        self.setting.signals.begin(self.peers, index)
        return index

    def finish(self) -> None:
        """End the call: nothing that comes later reads its buffer.

        Raises:
            RuntimeError: a wait gave up, as far as it is known by now; on the CPU, in this call.
        """
        self.setting.signals.finish(self.peers)
        self.setting.failures.copy()
        self.setting.failures.check()


class Push:
    """Copies of this rank's rows into the peers' buffers, on a stream of their own; a GPU's copy engines make them.

    A flag follows its data on the same stream, as a copy of the epoch in device memory: no processor takes part, so it
    can't be kept from coming by a grid that waits for it. On the CPU it is a release store.
    """

    def __init__(self, device: torch.device):
        self.module = torch.get_device_module(device)
        self.device = device
        self.stream = self.module.Stream(priority=-1)

    def start(self, rows: Tensor, channel: Channel, index: int):
        """Send `rows` (m, K) to row rank * m of buffer `index` of every peer, nearest predecessor first.

        Returns an event: `rows` has been read. Peers get READY.
        """
        buffer = channel.buffer
        own = slice(buffer.rank * len(rows), (buffer.rank + 1) * len(rows))
        begun, sent = self.module.Event(), self.module.Event()
        begun.record()
        self.stream.wait_event(begun)
        with self.module.stream(self.stream):
            for step in range(1, buffer.size):
                peer = (buffer.rank - step) % buffer.size
                buffer.peers[index][peer][own].copy_(rows, non_blocking=True)
                self.publish(buffer.peer_flags[peer][buffer.rank, READY], buffer.epoch)
            sent.record()
        return sent

    def publish(self, flag: Tensor, epoch: Tensor) -> None:
        """Set a flag (0-dim) to the epoch (1,) behind all copies so far."""
        if self.device.type == "cpu":
            native.load().flag_store(flag.data_ptr(), int(epoch))
        else:
            flag.copy_(epoch[0], non_blocking=True)

    def join(self, sent) -> None:
        """Let the current stream go on only after the event."""
        self.module.current_stream().wait_event(sent)
