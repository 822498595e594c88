"""The launcher with tiny scripts for ranks: exit codes, the first failure, signals, and that no process survives."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import pytest

from megalite.launch.children import Child
from megalite.launch.errors import record_error
from megalite.launch.main import launch
from megalite.launch.report import judge
from megalite.launch.supervise import Limits, supervise
from megalite.mesh import Sizes

FAST = Limits(settle_s=0.5, grace_s=0.5, stop_s=60.0)
PATIENT = Limits(settle_s=60.0)  # for ranks that all end by themselves

PRELUDE = """
import json, os, signal, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
here = Path(os.environ["HERE"])
def note_pid(name):
    (here / f"new-{name}").write_text(str(os.getpid()))
    (here / f"new-{name}").rename(here / name)
def wait_for(*names):
    while not all((here / name).exists() for name in names):
        time.sleep(0.01)
note_pid(f"pid{rank}")
def record(text, when=None, code=1):
    entry = dict(rank=rank, host="host7", pid=os.getpid(), time_s=when or time.time(), exit_code=code, text=text)
    (Path(os.environ["MEGALITE_ERROR_DIR"]) / f"rank{rank}.json").write_text(json.dumps(entry))
"""


class Job:
    """A script as the command of some ranks, and the pids that they left."""

    def __init__(self, folder, body):
        self.folder = folder
        self.errors = folder / "errors"
        self.errors.mkdir()
        script = folder / "rank.py"
        script.write_text(PRELUDE + textwrap.dedent(body))
        self.command = [sys.executable, "-S", str(script)]
        self.env = {**os.environ, "HERE": str(folder), "MEGALITE_ERROR_DIR": str(self.errors)}

    def run(self, ranks=2, limits=FAST):
        environments = {rank: {**self.env, "RANK": str(rank)} for rank in range(ranks)}
        return supervise(self.command, environments, errors=self.errors, limits=limits)

    def pids(self):
        return [int(path.read_text()) for path in self.folder.glob("pid*")]

    def assert_all_gone(self, ranks):
        assert len(self.pids()) == ranks
        for pid in self.pids():
            wait_until(lambda pid=pid: not alive(pid), 5, f"the end of process {pid}")


def alive(pid):
    """Whether a process runs (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, limit_s, what):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {limit_s} s for {what}"
        time.sleep(0.02)


@pytest.fixture
def job(tmp_path):
    return lambda body: Job(tmp_path, body)


@pytest.mark.parametrize(
    ("codes", "want"),
    [([0, 0], 0), ([3, 3], 3), ([0, 3], 3), ([2, 2], 2), ([0, 7], 1), ([1, 3], 1)],
)
def test_exit_codes(job, codes, want):
    assert job(f"sys.exit({codes}[rank])").run().code == want


def test_a_users_mistake_is_one_plain_message(job):
    outcome = job("record('mesh.tp=3 does not divide', code=2); sys.exit(2)").run(ranks=4)
    assert (outcome.code, outcome.message) == (2, "error: mesh.tp=3 does not divide")


def test_a_killed_rank_ends_the_others_and_is_named(job):
    body = """
    if rank == 1:
        wait_for("pid-grandchild")
        os.kill(os.getpid(), signal.SIGKILL)
    if os.fork() == 0:
        note_pid("pid-grandchild")
    time.sleep(600)
    """
    j = job(body)
    started = time.monotonic()
    outcome = j.run()
    assert time.monotonic() - started < 60  # they would sleep for 600 s
    assert outcome.code == 1
    assert "rank 1 of" in outcome.message
    assert "SIGKILL" in outcome.message
    j.assert_all_gone(3)


def test_ranks_that_ignore_sigterm_are_killed(job):
    body = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (here / f"ready{rank}").touch()
    wait_for("ready0", "ready1", "ready2")
    sys.exit(9) if rank == 0 else time.sleep(60)
    """
    j = job(body)
    outcome = j.run(ranks=3)
    assert "rank 0 of this node's 3" in outcome.message
    assert "exit code 9" in outcome.message
    j.assert_all_gone(3)


def test_the_first_error_is_reported_not_the_first_to_exit(job):
    body = """
    if rank == 2:
        record("ValueError: the cause", when=1000.0)
        time.sleep(0.4)
        sys.exit(1)
    record("RuntimeError: later", when=2000.0)
    wait_for("errors/rank2.json")
    sys.exit(1)
    """
    outcome = job(body).run(ranks=4, limits=PATIENT)
    assert "rank 2 of" in outcome.message
    assert "ValueError: the cause" in outcome.message
    assert "later" not in outcome.message
    assert "host7" in outcome.message


def test_a_lost_connection_is_never_the_cause(job):
    body = """
    record(["RuntimeError: Connection closed by peer", "OSError: disk full"][rank], when=[1000.0, 2000.0][rank])
    sys.exit(1)
    """
    assert "disk full" in job(body).run(limits=PATIENT).message


def test_a_kill_is_earlier_than_the_error_it_causes(tmp_path):
    """Rank 0 recorded an error a moment after rank 1 was killed; both ends were noticed at once, later."""

    def ended(rank, code, alive_s):
        return SimpleNamespace(
            rank=rank, code=code, alive_s=alive_s, ended_by=None, last_line=str, process=SimpleNamespace(pid=7)
        )

    record_error(tmp_path, 0, RuntimeError("something odd happened"))
    now = time.time()
    killed = judge([ended(0, 1, now - 9), ended(1, -9, now - 5)], tmp_path)
    assert "rank 1 of this node's 2" in killed.message
    unrelated = judge([ended(0, 1, now - 9), ended(1, -9, now + 5)], tmp_path)  # still alive long after the error
    assert "rank 0 of this node's 2" in unrelated.message


def test_a_child_is_seen_alive_only_before_its_end(job):
    j = job("sys.exit(5)")
    child = Child(0, j.command, {**j.env, "RANK": "0"})
    while child.poll():
        time.sleep(0.01)
    seen, noticed = child.alive_s, time.time()
    time.sleep(0.05)
    assert not child.poll()
    child.destroy()
    assert (child.code, child.ended_by) == (5, None)
    assert child.alive_s == seen < noticed


def test_the_last_words_of_a_rank_without_record(job):
    outcome = job("time.sleep(0.1)\nif rank == 1:\n    raise KeyError('lost')").run()
    assert "rank 1 of" in outcome.message
    assert "KeyError: 'lost'" in outcome.message


def test_signals_are_forwarded_and_a_saved_stop_is_3(job):
    body = """
    def stop(number, frame):
        (here / f"got{rank}").write_text(str(number))
        sys.exit(3)
    signal.signal(signal.SIGUSR1, stop)
    (here / f"ready{rank}").touch()
    if rank == 0:
        wait_for("ready1")
        os.kill(os.getppid(), signal.SIGUSR1)
    time.sleep(60)
    """
    j = job(body)
    former = signal.getsignal(signal.SIGUSR1)
    assert j.run().code == 3
    assert signal.getsignal(signal.SIGUSR1) == former
    assert [(j.folder / f"got{rank}").read_text() for rank in (0, 1)] == [str(int(signal.SIGUSR1))] * 2
    j.assert_all_gone(2)


def test_a_stop_that_is_not_obeyed_in_time(job):
    body = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (here / f"ready{rank}").touch()
    if rank == 0:
        wait_for("ready1")
        os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)
    """
    j = job(body)
    outcome = j.run(limits=Limits(stop_s=0.5))
    assert outcome.code == 1
    assert "before all ranks had saved" in outcome.message
    j.assert_all_gone(2)


LAUNCHER = """
import os, sys
from pathlib import Path
from megalite.launch.supervise import supervise
folder = Path(sys.argv[1])
common = {**os.environ, "HERE": str(folder), "MEGALITE_ERROR_DIR": str(folder)}
environments = {rank: {**common, "RANK": str(rank)} for rank in (0, 1)}
supervise([sys.executable, "-S", str(folder / "rank.py")], environments, errors=folder / "errors")
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_end_with_their_launcher(job, number):
    j = job("time.sleep(60)")
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(j.folder)])
    try:
        wait_until(lambda: len(j.pids()) == 2, 60, "two ranks")
        time.sleep(0.2)
        launcher.send_signal(number)
        launcher.wait(timeout=30)
    finally:
        launcher.kill()
    j.assert_all_gone(2)


def config(device="cpu", **sizes):
    """What launch reads of a Config."""
    run = SimpleNamespace(device=device, timeout_s=10.0, dir="runs/x")
    return SimpleNamespace(world_size=Sizes(**sizes).world, run=run)


def test_launch_gives_each_rank_its_variables_and_a_live_meeting_point(tmp_path):
    """Every rank reports its variables through the store that the launcher holds."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import json, os\nfrom pathlib import Path\nfrom datetime import timedelta\n"
        "from torch.distributed import TCPStore\n"
        "e = os.environ\n"
        "store = TCPStore(e['MASTER_ADDR'], int(e['MASTER_PORT']), is_master=False, timeout=timedelta(seconds=60))\n"
        "assert store.add('ranks', 1) <= 2\n"
        "store.wait(['ranks'])\n"
        f"Path({str(tmp_path)!r}, 'env' + e['RANK']).write_text(json.dumps(dict(e)))\n"
    )
    env = {**os.environ, "LOCAL_RANK": "77"}
    env.pop("OMP_NUM_THREADS", None)
    assert launch(config(tp=2), ["x.yaml"], env=env, command=[sys.executable, str(script)]) == 0
    for rank in (0, 1):
        got = json.loads((tmp_path / f"env{rank}").read_text())
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
        assert [got[name] for name in names] == [str(rank), str(rank), "2", "2", "1"]
        assert not os.path.exists(got["MEGALITE_ERROR_DIR"])


@pytest.mark.parametrize(
    ("options", "env", "match"),
    [
        ({"nnodes": 2}, {}, "--rdzv"),
        ({"nnodes": 3, "rdzv": "a:1"}, {}, "--nnodes=3 does not divide the 4 ranks"),
        ({"nnodes": 2, "node_rank": 2, "rdzv": "a:1"}, {}, "--node-rank=2"),
        ({"nnodes": 2, "rdzv": "justahost"}, {}, "HOST:PORT"),
        ({}, {"RANK": "0"}, "RANK=0 is set"),
    ],
)
def test_launch_refuses(options, env, match):
    with pytest.raises(ValueError, match=match):
        launch(config(dp_shard=2, tp=2), ["x.yaml"], env=env, command=["/bin/false"], **options)


def test_launch_refuses_more_ranks_than_gpus():
    with pytest.raises(ValueError, match="4096 ranks on this node .* but it has"):
        launch(config(device="cuda", tp=4096), ["x.yaml"], env={})


def test_launch_names_a_port_in_use():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port}"):
            launch(config(tp=2), [], env={}, nnodes=2, rdzv=f"127.0.0.1:{port}", command=["/bin/false"])
