"""The launcher with tiny scripts for ranks: exit codes, the first failure, signals, and that no process survives."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megalite.launch.elastic import Ended, Failure
from megalite.launch.errors import RankError
from megalite.launch.main import launch
from megalite.launch.report import Outcome, judge
from megalite.mesh import Sizes

PRELUDE = """
import json, os, signal, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
here = Path(__file__).parent
def note_pid(name):
    (here / f"new-{name}").write_text(str(os.getpid()))
    (here / f"new-{name}").rename(here / name)
def wait_for(*names):
    while not all((here / name).exists() for name in names):
        time.sleep(0.01)
note_pid(f"pid{rank}")
errors = Path(os.environ["MEGALITE_ERROR_DIR"])
def record(text, when=None, code=1):
    entry = dict(rank=rank, host="host7", pid=os.getpid(), time_s=when or time.time(), exit_code=code, text=text)
    (errors / f"rank{rank}.json").write_text(json.dumps(entry))
"""

LAUNCHER = """
import os, sys
from types import SimpleNamespace
from megalite.launch.main import launch
run = SimpleNamespace(device="cpu", timeout_s=float(sys.argv[3]), dir="runs/x")
config = SimpleNamespace(world_size=int(sys.argv[2]), run=run)
sys.exit(launch(config, [], env=dict(os.environ), command=[sys.executable, sys.argv[1]]))
"""


class Job:
    """A script as the command of some ranks, run by a launcher process of its own."""

    def __init__(self, folder, body):
        self.folder = folder
        self.script = folder / "rank.py"
        self.script.write_text(PRELUDE + textwrap.dedent(body))

    def start(self, ranks=2, limit_s=5):
        command = [sys.executable, "-c", LAUNCHER, str(self.script), str(ranks), str(limit_s)]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def run(self, ranks=2, limit_s=5):
        """The exit code and what was printed to stderr."""
        process = self.start(ranks, limit_s)
        _, err = process.communicate(timeout=90)
        return process.returncode, err

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


@pytest.mark.parametrize(("codes", "want"), [([0, 0], 0), ([2, 2], 2), ([0, 7], 1)])
def test_exit_codes(job, codes, want):
    assert job(f"sys.exit({codes}[rank])").run()[0] == want


def test_a_users_mistake_is_one_plain_message(job):
    code, err = job("record('mesh.tp=3 does not divide', code=2); sys.exit(2)").run(ranks=4)
    assert (code, err) == (2, "error: mesh.tp=3 does not divide\n")


ENDS = {"SIGABRT": "os.abort()", "the launcher's SIGTERM": "time.sleep(600)"}


@pytest.mark.parametrize("end", ENDS)
def test_a_users_mistake_decides_however_its_ranks_end(job, end):
    """Rank 1 records the mistake first, and dies in its teardown."""
    body = f"""
    wait_for(*["said1"][rank:])
    record("mesh.tp=3 does not divide", code=2)
    (here / f"said{{rank}}").touch()
    wait_for("said0")
    if rank == 0:
        sys.exit(2)
    {ENDS[end]}
    """
    code, err = job(body).run()
    assert (code, err) == (2, "error: mesh.tp=3 does not divide\n")


def test_a_killed_rank_ends_the_others_and_is_named(job):
    j = job("os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(600)")
    code, err = j.run()
    assert code == 1
    assert "rank 1 of" in err
    assert "SIGKILL" in err
    j.assert_all_gone(2)


def test_ranks_that_ignore_sigterm_are_killed(job):
    body = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (here / f"ready{rank}").touch()
    wait_for("ready0", "ready1", "ready2")
    sys.exit(9) if rank == 0 else time.sleep(600)
    """
    j = job(body)
    code, err = j.run(ranks=3, limit_s=2)
    assert code == 1
    assert "rank 0 of this node's 3" in err
    assert "exit code 9" in err
    j.assert_all_gone(3)


def test_a_stop_after_saving_is_3(job):
    body = """
    def stop(number, frame):
        (here / f"got{rank}").write_text(str(number))
        (errors / f"rank{rank}.stopped").touch()
        sys.exit(3)
    signal.signal(signal.SIGUSR1, stop)
    (here / f"ready{rank}").touch()
    time.sleep(60)
    """
    j = job(body)
    process = j.start(limit_s=30)
    wait_until(lambda: all((j.folder / f"ready{rank}").exists() for rank in (0, 1)), 60, "two ranks")
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=60) == 3
    assert [(j.folder / f"got{rank}").read_text() for rank in (0, 1)] == [str(int(signal.SIGUSR1))] * 2
    j.assert_all_gone(2)


def test_a_stop_that_is_not_obeyed_in_time(job):
    j = job("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n(here / f'ready{rank}').touch()\ntime.sleep(600)")
    process = j.start(limit_s=1)
    wait_until(lambda: all((j.folder / f"ready{rank}").exists() for rank in (0, 1)), 60, "two ranks")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "stopped by SIGTERM: 0 of 2 ranks" in err
    j.assert_all_gone(2)


def test_a_rank_ends_with_its_launcher(job):
    """kill -9 of the launcher: the kernel ends the ranks."""
    root = str(Path(__file__).parents[2])
    body = f"""
    sys.path.insert(0, {root!r})
    from megalite.launch.child import end_with_launcher
    end_with_launcher(os.environ)
    (here / f"ready{{rank}}").touch()
    time.sleep(600)
    """
    j = job(body)
    process = j.start()
    wait_until(lambda: all((j.folder / f"ready{rank}").exists() for rank in (0, 1)), 60, "two ranks")
    process.kill()
    process.wait()
    j.assert_all_gone(2)


def error(rank, time_s, text, code=1):
    return rank, RankError(rank, "host7", 70 + rank, time_s, code, text)


def outcome(failures, recorded=(), **options):
    ended = Ended(tuple(Failure(rank, 7, code, time_s) for rank, code, time_s in failures))
    return judge(ended, dict(recorded), **{"num_ranks": 4, "stopped": 0, **options})


def test_the_first_error_is_reported_not_the_first_to_exit():
    got = outcome([(0, 1, 50.0)], [error(2, 10.0, "ValueError: the cause"), error(0, 20.0, "RuntimeError: later")])
    assert got.code == 1
    assert "rank 2 of" in got.message
    assert "ValueError: the cause" in got.message
    assert "host7" in got.message


def test_a_lost_connection_is_never_the_cause():
    text = "RuntimeError: [enforce fail] Connection closed by peer [127.0.0.1]:5"
    got = outcome([(0, 1, 50.0)], [error(0, 10.0, text), error(1, 20.0, "OSError: disk full")])
    assert "disk full" in got.message


def test_a_kill_is_earlier_than_the_errors_it_causes():
    """Rank 0 recorded a lost connection before the agent noticed the killed rank 1."""
    got = outcome([(1, -9, 50.0)], [error(0, 49.9, "RuntimeError: Connection reset by peer")])
    assert "rank 1 of" in got.message
    assert "SIGKILL" in got.message


def test_the_agents_own_sigterm_is_not_the_cause():
    got = outcome([(0, -15, 50.0), (3, 9, 50.0)])
    assert "rank 3 of" in got.message


MISTAKE = "mesh.tp=3 does not divide"


@pytest.mark.parametrize("signal_number", [signal.SIGABRT, signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV])
def test_a_users_mistake_decides_over_ends_without_a_word(signal_number):
    """Rank 0's end is noticed before its own record is thought to be possible; rank 1 said the same, and died."""
    failures = [(0, -signal_number, 10.1), (1, -signal_number, 10.0)]
    assert outcome(failures, [error(1, 10.0, MISTAKE, code=2)]) == Outcome(2, f"error: {MISTAKE}")


def test_a_users_mistake_may_speak_of_connections():
    text = "--rdzv=a:1: connection refused; start node 0 first"
    got = outcome([], [error(0, 10.0, text, code=2), error(1, 9.0, "RuntimeError: Connection reset by peer")])
    assert got == Outcome(2, f"error: {text}")


def test_an_earlier_failure_of_another_kind_stays_the_cause():
    got = outcome([(1, 1, 50.0)], [error(0, 10.0, "OSError: disk full"), error(1, 20.0, MISTAKE, code=2)])
    assert (got.code, "disk full" in got.message) == (1, True)


def test_what_a_rank_recorded_is_why_it_failed():
    got = outcome([(2, -signal.SIGABRT, 50.0)], [error(2, 49.0, "OSError: disk full")])
    assert got == Outcome(1, "rank 2 of this node's 4 (host host7, pid 72) failed with exit code 1: OSError: disk full")


@pytest.mark.parametrize(
    ("failures", "stopped", "want"),
    [([], 0, 0), ([(0, 3, 1.0)], 1, 3), ([], 4, 3), ([(0, 3, 1.0), (1, 7, 1.0)], 1, 1), ([(1, 2, 1.0)], 0, 2)],
)
def test_the_code_of_a_node(failures, stopped, want):
    assert outcome(failures, stopped=stopped).code == want


def config(device="cpu", **sizes):
    """What launch reads of a Config."""
    run = SimpleNamespace(device=device, timeout_s=10.0, dir="runs/x")
    return SimpleNamespace(world_size=Sizes(**sizes).world, run=run)


def test_launch_gives_each_rank_its_variables_and_a_live_meeting_point(tmp_path):
    """Every rank reports its variables after meeting the others where the variables say."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import json, os\nfrom pathlib import Path\nfrom datetime import timedelta\n"
        "from torch.distributed import TCPStore\n"
        "e = os.environ\n"
        "store = TCPStore(e['MASTER_ADDR'], int(e['MASTER_PORT']), is_master=False, timeout=timedelta(seconds=60))\n"
        "store.add('ranks', 1)\n"
        "store.wait(['ranks'])\n"
        f"Path({str(tmp_path)!r}, 'env' + e['RANK']).write_text(json.dumps(dict(e)))\n"
    )
    assert launch(config(tp=2), ["x.yaml"], env={}, command=[sys.executable, str(script)]) == 0
    for rank in (0, 1):
        got = json.loads((tmp_path / f"env{rank}").read_text())
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
        assert [got[name] for name in names] == [str(rank), str(rank), "2", "2", "1"]
        assert got["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        assert not os.path.exists(got["MEGALITE_ERROR_DIR"])


def test_two_nodes_meet(job):
    """Two launchers on one machine, as node 0 and node 1."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    j = job("(here / f\"world{os.environ['WORLD_SIZE']}-{rank}\").touch()")
    more = f"nnodes=2, rdzv='127.0.0.1:{port}', node_rank=int(os.environ['NODE'])"
    text = LAUNCHER.replace("command=", f"{more}, command=")
    command = [sys.executable, "-c", text, str(j.script), "2", "30"]
    nodes = [subprocess.Popen(command, env={**os.environ, "NODE": str(node)}) for node in (0, 1)]
    assert [node.wait(timeout=90) for node in nodes] == [0, 0]
    assert sorted(path.name for path in j.folder.glob("world*")) == ["world2-0", "world2-1"]


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
