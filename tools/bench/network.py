"""A network of one's own for a group of processes, so that the kernel counts what they send: Linux, as root.

Processes started inside `own_network()` share a fresh namespace that holds only `lo`; all that they send, headers
included, passes it once.
"""

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CLONE_NEWNET = 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1
SENT_BYTES = 8
"""Column of /proc/net/dev after the interface's name."""


@contextmanager
def own_network() -> Iterator[None]:
    """Everything started by this thread in the block gets the new namespace; the caller is back in its own afterwards.

    Raises:
        OSError: not permitted, or not Linux.
    """
    with _back_home() as libc:
        _checked(libc.unshare(CLONE_NEWNET))
        _bring_up(b"lo")
        yield


@contextmanager
def inside(namespace: int) -> Iterator[None]:
    """As `own_network`, in a namespace that exists: a descriptor of it (see `handle`)."""
    with _back_home() as libc:
        _checked(libc.setns(namespace, CLONE_NEWNET))
        yield


def handle() -> int:
    """A descriptor of this thread's namespace, which lives at least as long; the caller closes it."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


@contextmanager
def _back_home() -> Iterator[ctypes.CDLL]:
    libc = ctypes.CDLL(None, use_errno=True)
    home = handle()
    try:
        try:
            yield libc
        finally:
            _checked(libc.setns(home, CLONE_NEWNET))
    finally:
        os.close(home)


def available() -> bool:
    """Whether `own_network` works here."""
    try:
        with own_network():
            return True
    except (OSError, AttributeError):  # no permission, no /proc, no unshare in libc
        return False


def sent_bytes(pid: int, interface: str = "lo") -> int:
    """What an interface in the namespace of a process has sent."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, columns = line.partition(":")
        if name.strip() == interface:
            return int(columns.split()[SENT_BYTES])
    raise RuntimeError(f"process {pid} has no interface {interface}")


def free_port() -> int:
    """A port that nobody listens on in this thread's network."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _bring_up(name: bytes) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sH14x", name, 0)
        _, flags = struct.unpack("16sH14x", fcntl.ioctl(probe, SIOCGIFFLAGS, request))
        fcntl.ioctl(probe, SIOCSIFFLAGS, struct.pack("16sH14x", name, flags | IFF_UP))


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
