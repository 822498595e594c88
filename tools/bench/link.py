"""Two networks of one's own, joined by a slow link: for a job with one rank in each. Linux, as root; needs ip and tc.

The link is a veth pair, each end slowed by a token bucket (tbf), or, with a delay, two tun devices between which a
process of ours (relay.py) carries packets that much later.
Invariant: the namespaces have no name. Only descriptors of this process and the ranks in them keep them, so the kernel
removes them and the devices in them however this process ends; nothing is left that had to be swept.
"""

import fcntl
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

from bench import network
from bench.job import END_LIMIT_S, Host

DEVICE = "slow0"
"""The link's device in either network."""
ADDRESSES = ("10.77.0.1", "10.77.0.2")
BURST_BYTES = 80 * 1024
"""Of the bucket: one packet as large as the sender's segmentation makes them, which tbf would else cut up."""
QUEUE_BYTES = 8 * 1024 * 1024
"""In front of the bucket: more than TCP's windows here, so that nothing is dropped."""
TUN_MTU = 65520
"""Large packets, so that a relay in Python keeps up with 1 Gbit/s."""
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x1, 0x1000
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True)
class Speed:
    """Of each direction. rate: as tc writes it, 200mbit."""

    rate: str
    delay_ms: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """Of the line.

        Raises:
            ValueError: not a rate.
        """
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", self.rate)
        if found is None or float(found[1]) == 0:
            raise ValueError(f"--rate {self.rate} is not a rate; write a number and kbit, mbit or gbit, as 200mbit")
        return float(found[1]) * UNITS[found[2]] / 8

    def text(self) -> str:
        """For titles."""
        return self.rate + (f", {self.delay_ms:g} ms each way" if self.delay_ms else "")


@contextmanager
def slow_link(speed: Speed) -> Iterator[list[Host]]:
    """The hosts of the two ranks.

    Raises:
        OSError, subprocess.CalledProcessError: not permitted, or ip, tc or a kernel module is missing.
    """
    resource_tracker.ensure_running()  # else it starts with the first rank, lives in its network and outlives it
    with ExitStack() as stack:
        ends = [stack.enter_context(_namespace()) for _ in ADDRESSES]
        if speed.delay_ms:
            stack.enter_context(_relayed(ends, speed))
        else:
            _veth_pair(ends)
        for end, address in zip(ends, ADDRESSES, strict=True):
            with network.inside(end):
                _run("ip", "addr", "add", f"{address}/24", "dev", DEVICE)
                _run("ip", "link", "set", DEVICE, "up")
                bucket = ("rate", speed.rate, "burst", str(BURST_BYTES), "limit", str(QUEUE_BYTES))
                _run("tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", *bucket)
        environment = {"MASTER_ADDR": ADDRESSES[0], "GLOO_SOCKET_IFNAME": DEVICE}
        yield [Host(lambda end=end: network.inside(end), environment) for end in ends]


@contextmanager
def _namespace() -> Iterator[int]:
    with network.own_network():
        end = network.handle()
    try:
        yield end
    finally:
        os.close(end)


def _veth_pair(ends: list[int]) -> None:
    """Both ends are made where they belong, so that a name taken here does no harm."""
    other = f"/proc/{os.getpid()}/fd/{ends[1]}"
    with network.inside(ends[0]):
        _run("ip", "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", other)


@contextmanager
def _relayed(ends: list[int], speed: Speed) -> Iterator[None]:
    """Two tun devices and the process between them, which ends when the pipe from here does."""
    devices = [_tun(end) for end in ends]
    alive, ours = os.pipe()
    try:
        command = [sys.executable, str(Path(__file__).with_name("relay.py")), str(alive), str(speed.delay_ms)]
        with subprocess.Popen([*command, *map(str, devices)], pass_fds=[alive, *devices]) as relay:
            try:
                yield
            finally:
                os.close(ours)
                _ended(relay)
    finally:
        for descriptor in (alive, *devices):
            os.close(descriptor)


def _ended(relay: subprocess.Popen) -> None:
    try:
        relay.wait(END_LIMIT_S)
    except subprocess.TimeoutExpired:
        relay.kill()


def _tun(end: int) -> int:
    with network.inside(end):
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH14x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
        _run("ip", "link", "set", DEVICE, "mtu", str(TUN_MTU))
    return device


def _run(*command: str) -> None:
    """As a child of this thread, thus in its network; what it says is part of the error."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
