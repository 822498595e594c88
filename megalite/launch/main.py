"""`megalite launch`: the ranks of this node through torchrun's agent, or the text of a SLURM job.

Each rank runs `python -m megalite train ...` with torchrun's variables; on one node they meet at a port that the
agent picks and holds.
"""

import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence

import torch

from megalite.config.schema import Config
from megalite.launch.elastic import Node, run_ranks
from megalite.launch.errors import ERROR_DIR, count_stops, read_errors
from megalite.launch.report import judge
from megalite.launch.slurm import sbatch_text


def launch(
    config: Config,
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    nnodes: int = 1,
    node_rank: int = 0,
    rdzv: str | None = None,
    slurm: bool = False,
    command: Sequence[str] | None = None,
) -> int:
    """Start this node's ranks and wait for them; returns the job's exit code (0, 1, 2, 3).

    Args:
        arguments: what `megalite train` gets: the config's path, then overrides.
        env:       the environment that the ranks inherit.
        rdzv:      HOST:PORT of node 0; needed with nnodes > 1.
        slurm:     only print an sbatch script.
        command:   run this instead of `python -m megalite train <arguments>`.

    Raises:
        ValueError: the ranks do not fit the nodes or the devices, or the meeting point can't be used.
    """
    if slurm:
        print(sbatch_text(config, arguments, nnodes=nnodes, python=sys.executable), end="")
        return 0
    _check_nodes(nnodes, node_rank, rdzv, env)
    local = _local_world_size(config, nnodes)
    program = command or [sys.executable, "-m", "megalite", "train", *arguments]
    with tempfile.TemporaryDirectory(prefix="megalite-") as errors:
        ended = run_ranks(
            program,
            Node(local, nnodes, node_rank, rdzv),
            variables={"OMP_NUM_THREADS": env.get("OMP_NUM_THREADS", "1"), "PYTHONUNBUFFERED": "1", ERROR_DIR: errors},
            limit_s=config.run.timeout_s,
        )
        outcome = judge(ended, read_errors(errors), num_ranks=local, stopped=count_stops(errors))
    if outcome.message:
        print(outcome.message, file=sys.stderr, flush=True)
    return outcome.code


def _check_nodes(nnodes: int, node_rank: int, rdzv: str | None, env: Mapping[str, str]) -> None:
    if "RANK" in env:
        raise ValueError(f"RANK={env['RANK']} is set: launch starts the ranks itself; under torchrun use `train`")
    if not 0 <= node_rank < nnodes:
        raise ValueError(f"--node-rank={node_rank} must be in 0..{nnodes - 1} for --nnodes={nnodes}")
    if nnodes > 1 and rdzv is None:
        raise ValueError(f"--nnodes={nnodes} needs --rdzv=HOST:PORT, the address of node 0, the same on every node")
    if rdzv is not None:
        _check_rdzv(rdzv, node_rank)


def _local_world_size(config: Config, nnodes: int) -> int:
    world = config.world_size
    local, rest = divmod(world, nnodes)
    if rest or not local:
        raise ValueError(f"--nnodes={nnodes} does not divide the {world} ranks of mesh.pp x mesh.dp x mesh.tp")
    wants_cuda = config.run.device == "cuda" or (config.run.device == "auto" and torch.cuda.is_available())
    if wants_cuda and local > torch.cuda.device_count():
        raise ValueError(
            f"{local} ranks on this node (mesh.pp x mesh.dp x mesh.tp = {world}, --nnodes={nnodes}), but it has "
            f"{torch.cuda.device_count()} GPUs; use a smaller mesh, more nodes, or run.device=cpu"
        )
    return local


def _check_rdzv(rdzv: str, node_rank: int) -> None:
    """HOST:PORT, and on node 0 a port that can be listened on."""
    host, _, port = rdzv.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ValueError(f"--rdzv={rdzv} must be HOST:PORT with a port between 1 and 65535")
    if node_rank > 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port)))
        except OSError as error:
            raise ValueError(f"--rdzv={rdzv}: can't listen on port {port}; is it in use? ({error})") from error
