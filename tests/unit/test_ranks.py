"""A rank's place from the variables of torchrun and srun, and refusal of what does not fit together."""

import socket

import pytest

from megalite.train.ranks import Place, check_port_free, first_host, rank_from_env

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "n0",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_NODELIST": "gpu[003-004]",
    "SLURM_JOB_ID": "123456",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}


def test_alone():
    assert rank_from_env({"PATH": "/bin", "MASTER_ADDR": "left-over"}) == Place(0, 0, 1, 1, None, None)


def test_torchrun():
    place = rank_from_env(TORCHRUN)
    assert place == Place(5, 1, 8, 4, "n0", 29500)
    assert place.init_method == "tcp://n0:29500"
    assert rank_from_env(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).agent_store
    assert not rank_from_env(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).agent_store
    assert rank_from_env(TORCHRUN | {"MASTER_ADDR": "fe80::1"}).init_method == "tcp://[fe80::1]:29500"


def test_torchrun_under_srun_wins():
    assert rank_from_env(SRUN | TORCHRUN | {"RANK": "2"}).rank == 2


def test_srun():
    assert rank_from_env(SRUN) == Place(5, 1, 8, 4, "gpu003", 15000 + 123456 % 15000)
    moved = rank_from_env(SRUN | {"MASTER_ADDR": "n9", "MASTER_PORT": "7000"})
    assert (moved.master_addr, moved.master_port) == ("n9", 7000)


def test_srun_uneven_nodes_steps_and_fallbacks():
    uneven = SRUN | {"SLURM_TASKS_PER_NODE": "3(x2),2", "SLURM_NODEID": "2", "SLURM_PROCID": "7"}
    assert rank_from_env(uneven).local_world_size == 2
    step = SRUN | {"SLURM_STEP_NODELIST": "gpu004", "SLURM_STEP_ID": "2"}
    assert rank_from_env(step).master_addr == "gpu004"
    assert rank_from_env(step).master_port != rank_from_env(SRUN).master_port
    bare = {name: SRUN[name] for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_JOB_ID")}
    assert rank_from_env(bare | {"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}).master_addr == "10.0.0.1"
    assert rank_from_env({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}).world_size == 1


@pytest.mark.parametrize("missing", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_torchrun_half_set(missing):
    env = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(ValueError, match=f"^{missing} is not set but "):
        rank_from_env(env)


@pytest.mark.parametrize("missing", ["SLURM_LOCALID", "SLURM_NTASKS", "SLURM_JOB_ID"])
def test_srun_half_set(missing):
    with pytest.raises(ValueError, match=f"^{missing} is not set"):
        rank_from_env({name: value for name, value in SRUN.items() if name != missing})
    with pytest.raises(ValueError, match="SLURM_LAUNCH_NODE_IPADDR is not set"):
        rank_from_env({name: value for name, value in SRUN.items() if name != "SLURM_NODELIST"})


@pytest.mark.parametrize(
    ("env", "match"),
    [
        (TORCHRUN | {"RANK": "8"}, "RANK=8 must be less than WORLD_SIZE=8"),
        (TORCHRUN | {"RANK": "-1"}, "RANK='-1' is not a whole number"),
        (TORCHRUN | {"WORLD_SIZE": "eight"}, "WORLD_SIZE='eight'"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK=4"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "9 ranks on this node, but WORLD_SIZE=8"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        (SRUN | {"SLURM_PROCID": "8"}, "SLURM_PROCID=8 must be less than SLURM_NTASKS=8"),
        (SRUN | {"SLURM_TASKS_PER_NODE": "four"}, "SLURM_TASKS_PER_NODE='four'"),
        (SRUN | {"SLURM_NODEID": "2"}, "SLURM_NODEID=2 has no entry"),
        (SRUN | {"SLURM_NODELIST": ","}, "holds no host name"),
    ],
)
def test_contradictions(env, match):
    with pytest.raises(ValueError, match=match):
        rank_from_env(env)


@pytest.mark.parametrize(
    ("nodelist", "want"),
    [
        ("a", "a"),
        ("a,b[1-2]", "a"),
        ("n[007-010,012],m1", "n007"),
        ("gpu-[9]-ib,x", "gpu-9-ib"),
        ("r[1-2]n[05,07]", "r1n05"),
        ("node-1.cluster.org", "node-1.cluster.org"),
    ],
)
def test_first_host(nodelist, want):
    assert first_host(nodelist) == want


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        place = Place(0, 0, 2, 2, "127.0.0.1", port)
        with pytest.raises(ValueError, match=f"MASTER_PORT={port} is not free"):
            check_port_free(place)
        check_port_free(Place(1, 1, 2, 2, "127.0.0.1", port))  # only rank 0 listens
        check_port_free(Place(0, 0, 2, 2, "127.0.0.1", port, agent_store=True))  # the launcher listens
    check_port_free(place)
