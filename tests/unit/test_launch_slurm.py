"""The sbatch text: its numbers, and its shell run with stand-ins for srun, scontrol and scancel."""

import os
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest

from megalite.launch.main import launch
from megalite.launch.slurm import sbatch_text


def config(world_size, device="auto"):
    return SimpleNamespace(
        world_size=world_size, run=SimpleNamespace(device=device, dir="runs/llama 8b", timeout_s=9.0)
    )


@pytest.mark.parametrize(
    ("world", "nnodes", "nodes", "per_node"), [(4, 1, 1, 4), (8, 1, 1, 8), (64, 1, 8, 8), (16, 4, 4, 4)]
)
def test_numbers(world, nnodes, nodes, per_node):
    lines = sbatch_text(config(world), ["c.yaml"], nnodes=nnodes).splitlines()
    assert lines[0] == "#!/bin/bash"
    for option in (f"nodes={nodes}", f"ntasks-per-node={per_node}", f"gpus-per-node={per_node}", "requeue"):
        assert f"#SBATCH --{option}" in lines
    assert "#SBATCH --signal=B:USR1@120" in lines
    assert "#SBATCH --open-mode=append" in lines
    assert "#SBATCH --job-name=megalite-llama-8b" in lines


def test_cpu_asks_for_no_gpus_and_uneven_nodes_are_refused():
    assert "gpus" not in sbatch_text(config(4, device="cpu"), ["c.yaml"])
    with pytest.raises(ValueError, match="9 ranks .* 2 nodes"):
        sbatch_text(config(9), ["c.yaml"])


def test_launch_prints_it(capsys):
    assert launch(config(8), ["c.yaml", "data.train=[{path: a b}]"], env={}, slurm=True) == 0
    assert "-m megalite train c.yaml 'data.train=[{path: a b}]' &" in capsys.readouterr().out


@pytest.fixture
def cluster(tmp_path):
    """Runs a script with stand-ins; srun's behaviour is given, and scontrol and scancel log their arguments."""

    def write(name, body):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)

    write("scontrol", f'echo "scontrol $*" >> {tmp_path}/log; printf "n1\\nn2\\n"')
    write("scancel", f'echo "scancel $*" >> {tmp_path}/log; touch {tmp_path}/stop')

    def start(srun):
        write("srun", srun.format(here=tmp_path))
        write("job", sbatch_text(config(8), ["c.yaml"]))
        env = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURM_JOB_ID": "30007",
            "SLURM_JOB_NODELIST": "n[1-2]",
        }
        return subprocess.Popen([tmp_path / "job"], env=env, stdout=subprocess.DEVNULL)

    return SimpleNamespace(start=start, log=lambda: (tmp_path / "log").read_text(), here=tmp_path)


def test_the_script_passes_the_meeting_point_and_the_exit_code(cluster):
    job = cluster.start('echo "$MASTER_ADDR $MASTER_PORT $*" > {here}/srun.log; exit 7')
    assert job.wait(timeout=60) == 7
    words = (cluster.here / "srun.log").read_text().split()
    assert words[:2] == ["n1", "15007"]
    assert words[-5:] == ["python", "-m", "megalite", "train", "c.yaml"]
    assert "requeue" not in cluster.log()


def test_the_script_saves_and_queues_again_before_the_time_limit(cluster):
    job = cluster.start("touch {here}/running; while [ ! -e {here}/stop ]; do sleep 0.05; done; sleep 0.2; exit 3")
    deadline = time.monotonic() + 60
    while not (cluster.here / "running").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=60) == 3
    assert "scancel --signal=USR1 30007" in cluster.log()
    assert "scontrol requeue 30007" in cluster.log()
