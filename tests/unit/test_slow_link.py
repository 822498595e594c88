"""tools/slow_link.py: what its numbers mean, the link itself (as root), and a tiny run through it."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from megalite.comm.collectives import all_gather, all_reduce, broadcast, reduce_scatter
from megalite.mesh import Group

ROOT = Path(__file__).resolve().parents[2]
TOOLS = str(ROOT / "tools")
sys.path.insert(0, TOOLS)
slow_link = __import__("slow_link")
from bench import link, link_rows, link_tables, measure, network, rows, silent_side, tables  # noqa: E402

while TOOLS in sys.path:
    sys.path.remove(TOOLS)
LINK = link.Speed("80mbit")


def link_works() -> bool:
    """Root, ip, tc and the kernel's veth and tbf."""
    try:
        with link.slow_link(LINK):
            return True
    except OSError:
        return False


needs_link = pytest.mark.skipif(
    not (network.available() and link_works()), reason="needs root on Linux, ip, tc, veth and tbf"
)


def times(label: str, *, compute: float, comm: float, step: float, row: str = "tp", rate: str = "r"):
    """A contestant's numbers; it sends 10 MB on a line of 20 MB/s."""
    values = {"sent_bytes": 10e6, "bytes_per_s": 20e6, "num_calls": 1}
    return link_rows.Times(row, label, rate, [compute], [comm], [step], **values)


def test_what_is_hidden():
    found = times("x", compute=2.0, comm=1.0, step=2.25)
    assert found.hidden == 0.75
    assert found.exposed == 0.25
    assert found.wire_s == 0.5
    assert found.over_floor == 1.125  # computation is the longer one
    assert times("x", compute=0.25, comm=1.0, step=1.0).over_floor == 2.0  # the line is
    assert times("x", compute=1.0, comm=1.0, step=2.5).hidden == -0.5


def test_verdicts_of_chunked():
    own = {
        link_rows.NONE.label: times("none", compute=1.0, comm=4.0, step=5.0),
        link_rows.CHUNKED.label: times("chunked", compute=1.0, comm=4.0, step=4.2),
    }
    (verdict,) = link_rows.verdicts(link_rows.selected(["tp"])[0], own)
    assert verdict.found == pytest.approx(0.2)
    assert not verdict.holds
    assert verdict.possible == 0.25
    text = link_tables.verdict_text("here", verdict)
    assert text.startswith("MISSED: here: chunked hides")
    assert "at most 0.25 was possible" in text


def test_verdicts_of_zero3():
    row = link_rows.selected(["zero3"])[0]
    own = {
        link_rows.MEGALITE.label: times("megalite", compute=2.0, comm=1.0, step=2.3),
        link_rows.FSDP.label: times("fsdp", compute=2.0, comm=1.0, step=3.4),
    }
    hidden, faster = link_rows.verdicts(row, own)
    assert (round(hidden.found, 6), hidden.holds) == (0.7, True)
    assert (round(faster.found, 3), faster.holds) == (1.478, False)


def test_report_and_numbers():
    lines = [
        times(c.label, compute=2.0, comm=1.0, step=2.0 + n, row="zero3")
        for n, c in enumerate((link_rows.MEGALITE, link_rows.FSDP))
    ]
    chosen = link_rows.selected(["zero3"])
    found = link_rows.LinkFound(lines, ["r: tp 2 + sp: rank 1 ended"])
    about = {"work": rows.TINY, "effort": measure.Effort(1, 1, 2), "where": tables.machine()}
    text = link_tables.report(chosen, found, **about, markdown=True)
    assert "| r | dp 2, ZeRO-3 | megalite | 2.00 | 1.00 | 2.00 | 100% | 0.00 | 10.0 | 0.50 | 1.00x | 1.50x |" in text
    assert "| torch fully_shard | 2.00 | 1.00 | 3.00 | 0% | 1.00 | 10.0 | 0.50 | 1.50x |  |" in text
    assert "FAILED r: tp 2 + sp: rank 1 ended" in text
    numbers = json.loads(json.dumps(link_tables.numbers(chosen, found, **about)))
    assert [v["holds"] for v in numbers["verdicts"]] == [True, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "fast"], "--rate fast is not a rate; write a number and kbit, mbit or gbit"),
        (["--rate", "0mbit"], "--rate 0mbit is not a rate"),
        (["--delay-ms", "-1"], "--delay-ms -1 is negative"),
        (["--hidden", "100"], "--hidden 100 is no multiple of 64"),
        (["--layers", "0"], "--layers 0 must be at least 1"),
    ],
)
def test_wrong_inputs(arguments, message, capsys):
    assert slow_link.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_rates():
    assert link.Speed("200mbit").bytes_per_s == 25e6
    assert link.Speed("1.5gbit").bytes_per_s == 187.5e6


def test_a_silent_group_sends_nothing_and_leaves_finite_numbers():
    group = Group("tp", ranks=(0, 1), rank=1, local=silent_side.SilentChannel())  # no process group at all
    shard = torch.arange(6.0).view(3, 2)
    out = torch.full((6, 2), torch.nan)
    all_gather(out, shard, group)
    assert torch.equal(out, torch.cat([shard, shard]))
    out[3:] = shard + 1
    all_gather(out, out[3:], group)
    assert torch.equal(out, torch.cat([shard + 1, shard + 1]))
    own = torch.full((3, 2), torch.nan)
    reduce_scatter(own, torch.cat([shard + 9, shard]), group, async_op=True, exclusive=True).wait()
    assert own.tolist() == (shard + 9).tolist()
    reduce_scatter(own, torch.cat([shard, shard + 5]), group)
    assert torch.equal(own, shard)
    all_reduce(own, group)
    broadcast(own, group)
    assert torch.equal(own, shard)


def transfer_s(hosts, num_bytes: int) -> float:
    """Seconds that a message takes from the second host to the first and a byte back."""
    with hosts[0].entered():
        server = socket.create_server((link.ADDRESSES[0], 0))
    with hosts[1].entered():
        client = socket.create_connection(server.getsockname())
    with server, client, server.accept()[0] as taken:

        def take() -> None:
            received = 0
            while received < num_bytes:
                received += len(taken.recv(1 << 20))
            taken.sendall(b"x")

        thread = threading.Thread(target=take)
        thread.start()
        start = time.monotonic()
        client.sendall(bytes(num_bytes))
        client.recv(1)
        thread.join()
        return time.monotonic() - start


@needs_link
@pytest.mark.timeout(60)
def test_the_link_is_as_slow_as_asked():
    num_bytes = 2_000_000
    with link.slow_link(LINK) as hosts:
        assert transfer_s(hosts, num_bytes) > 0.9 * (num_bytes - link.BURST_BYTES) / LINK.bytes_per_s


@needs_link
@pytest.mark.timeout(60)
def test_the_relay_delays():
    try:
        with link.slow_link(link.Speed("1gbit", delay_ms=30.0)) as hosts:
            assert 0.06 < transfer_s(hosts, 10) < 5
    except OSError as error:
        pytest.skip(f"no tun device here: {error}")


HOLDER = """
import sys, time
sys.path.insert(0, {tools!r})
from bench import link
if __name__ == "__main__":
    with link.slow_link(link.Speed("80mbit", {delay})) as hosts:
        with hosts[0].entered():
            import os
            print(os.readlink("/proc/thread-self/ns/net"), flush=True)
        time.sleep(60)
"""


def namespaces() -> set[str]:
    """Network namespaces that some process is in or holds open."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        for entry in (process / "ns" / "net", *(process / "fd").glob("*")):
            try:
                found.add(str(entry.readlink()))
            except OSError:  # the process has ended, or may not be read
                continue
    return {name for name in found if name.startswith("net:")}


@needs_link
@pytest.mark.timeout(60)
@pytest.mark.parametrize("delay", [0.0, 1.0])
@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_behind(tmp_path, death, delay):
    script = tmp_path / "holder.py"
    script.write_text(HOLDER.format(tools=TOOLS, delay=delay))
    holder = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with holder:
        name = holder.stdout.readline().strip()
        assert name.startswith("net:")
        assert name in namespaces()
        holder.send_signal(death)
        holder.wait(20)
    until = time.monotonic() + 20
    while name in namespaces() and time.monotonic() < until:
        time.sleep(0.1)  # the relay notices, the kernel tears down
    assert name not in namespaces()


@needs_link
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_whole_run(tmp_path):
    path = tmp_path / "found.json"
    chosen = ["--tiny", "--only", "zero0", "--rate", "1gbit", "--out", str(path)]
    tool = [sys.executable, str(ROOT / "tools" / "slow_link.py"), *chosen]
    done = subprocess.run(tool, capture_output=True, text=True, timeout=390)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert [line["label"] for line in found["times"]] == ["megalite", "torch DDP"]
    num_bytes = 4 * 49_440  # tiny's parameters: each of two ranks sends as much for an all-reduce
    for line in found["times"]:
        assert num_bytes < line["sent_bytes"] < 1.3 * num_bytes
        assert line["num_calls"] > 0
        assert min(line["compute_s"] + line["comm_s"] + line["step_s"]) > 0
