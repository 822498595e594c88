"""Carries packets between two tun devices, each some milliseconds later; a program of its own, started by link.py.

Rates are limited in front of the devices by the kernel, so a packet is only held here. It ends when its pipe closes,
which happens however its parent ends.
"""

import os
import select
import sys
import time
from collections import deque

MAX_PACKET = 1 << 16
RECEIVE_AT_ONCE = 32


def main(alive: int, delay_s: float, devices: list[int]) -> None:
    """Relay until `alive` is closed at the other end."""
    held: list[deque[tuple[float, bytes]]] = [deque(), deque()]
    """By device that a packet came from: (when it is due, the packet)."""
    while True:
        due = min((queue[0][0] for queue in held if queue), default=None)
        wait_s = None if due is None else max(0.0, due - time.monotonic())
        ready, _, _ = select.select([alive, *devices], [], [], wait_s)
        if alive in ready:
            return
        for index, device in enumerate(devices):
            if device in ready:
                receive(device, held[index], delay_s)
            send_due(devices[1 - index], held[index])


def receive(device: int, queue: deque[tuple[float, bytes]], delay_s: float) -> None:
    """Take what is there, but not for ever: the other direction waits."""
    for _ in range(RECEIVE_AT_ONCE):
        try:
            packet = os.read(device, MAX_PACKET)
        except BlockingIOError:
            return
        queue.append((time.monotonic() + delay_s, packet))


def send_due(device: int, queue: deque[tuple[float, bytes]]) -> None:
    """Deliver the packets whose time has come, in order."""
    while queue and queue[0][0] <= time.monotonic():
        os.write(device, queue.popleft()[1])


if __name__ == "__main__":
    pipe, delay_ms, *both = sys.argv[1:]
    main(int(pipe), float(delay_ms) / 1e3, [int(device) for device in both])
