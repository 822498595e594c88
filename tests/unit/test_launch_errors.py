"""Error files, and a real gloo job in which one rank fails: the report names that rank and not its victims."""

import os
import sys
import textwrap
from types import SimpleNamespace

import pytest

from megalite.launch.errors import read_errors, record_error
from megalite.launch.main import launch

RANK = """
import os, signal, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from megalite.launch.errors import record_error
from megalite.train.ranks import rank_from_env
torch.set_num_threads(1)
place = rank_from_env(os.environ)
try:
    dist.init_process_group("gloo", init_method="env://", rank=place.rank, world_size=place.world_size,
                            timeout=timedelta(seconds=60))
    x = torch.full((4,), float(place.rank))
    for step in range(1000):
        dist.all_reduce(x)
        if step == 3 and place.rank == 1:
            {fault}
except Exception as error:
    record_error(os.environ["MEGALITE_ERROR_DIR"], place.rank, error)
    sys.exit(1)
"""


def raised(error):
    try:
        raise error
    except type(error) as caught:
        return caught


def test_record_and_read(tmp_path):
    record_error(tmp_path, 3, raised(KeyError("lost")))
    record_error(tmp_path, 3, raised(OSError("a later failure of the same rank")))
    record_error(tmp_path, 0, raised(ValueError("mesh.tp=3 does not divide")), exit_code=2)
    got = read_errors(tmp_path)
    assert sorted(got) == [0, 3]
    assert (got[3].text, got[3].exit_code, got[3].pid) == ("KeyError: 'lost'", 1, os.getpid())
    assert "test_launch_errors.py" in got[3].trace
    assert (got[0].text, got[0].trace) == ("mesh.tp=3 does not divide", "")
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    ("fault", "words"),
    [("raise FloatingPointError('loss is nan')", "FloatingPointError: loss is nan"), ("os._exit(9)", "exit code 9")],
)
def test_a_gloo_job_names_the_rank_that_failed(tmp_path, capfd, fault, words):
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(RANK.replace("{fault}", fault)))
    config = SimpleNamespace(world_size=3, run=SimpleNamespace(device="cpu", timeout_s=60.0))
    assert launch(config, [], env=dict(os.environ), command=[sys.executable, str(script)]) == 1
    summary = capfd.readouterr().err.strip().splitlines()[-1]
    assert summary.startswith("rank 1 of this node's 3 (host ")
    assert words in summary
