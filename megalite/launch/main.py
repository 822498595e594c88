"""`megalite launch`: the ranks of this node as child processes, or the text of a SLURM job.

Each rank runs `python -m megalite train ...` with torchrun's variables. The meeting point (a TCPStore) is held by the
launcher of node 0, on a port that it keeps from the start, so no other program can take it between choosing and using.
"""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.distributed import TCPStore

from megalite.config.schema import Config
from megalite.launch.errors import ERROR_DIR
from megalite.launch.slurm import sbatch_text
from megalite.launch.supervise import Limits, supervise


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
    with tempfile.TemporaryDirectory(prefix="megalite-") as errors:
        host, port, store = _meeting_point(rdzv, node_rank)
        common = {**_defaults(env), "MASTER_ADDR": host, "MASTER_PORT": str(port), ERROR_DIR: errors}
        environments = {
            rank: {**common, **rank_variables(rank, local=local, world=config.world_size)}
            for rank in range(node_rank * local, (node_rank + 1) * local)
        }
        outcome = supervise(
            command or [sys.executable, "-m", "megalite", "train", *arguments],
            environments,
            errors=Path(errors),
            limits=Limits(stop_s=config.run.timeout_s),
        )
    del store
    if outcome.message:
        print(outcome.message, file=sys.stderr, flush=True)
    return outcome.code


def rank_variables(rank: int, *, local: int, world: int) -> dict[str, str]:
    """torchrun's variables of one rank, where every node holds `local` of `world` ranks."""
    node, local_rank = divmod(rank, local)
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "GROUP_RANK": node,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": local,
    }
    return {name: str(number) for name, number in numbers.items()}


def _defaults(env: Mapping[str, str]) -> dict[str, str]:
    """The inherited environment, one thread per rank unless the user says otherwise, and unbuffered output."""
    return {"OMP_NUM_THREADS": "1", **env, "PYTHONUNBUFFERED": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}


def _check_nodes(nnodes: int, node_rank: int, rdzv: str | None, env: Mapping[str, str]) -> None:
    if "RANK" in env:
        raise ValueError(f"RANK={env['RANK']} is set: launch starts the ranks itself; under torchrun use `train`")
    if not 0 <= node_rank < nnodes:
        raise ValueError(f"--node-rank={node_rank} must be in 0..{nnodes - 1} for --nnodes={nnodes}")
    if nnodes > 1 and rdzv is None:
        raise ValueError(f"--nnodes={nnodes} needs --rdzv=HOST:PORT, the address of node 0, the same on every node")


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


def _meeting_point(rdzv: str | None, node_rank: int) -> tuple[str, int, TCPStore | None]:
    """Host, port and, on node 0, the listening store; it lives as long as the caller keeps it."""
    host, port = _parse_rdzv(rdzv) if rdzv else ("127.0.0.1", 0)
    if node_rank > 0:
        return host, port, None
    try:
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        raise ValueError(f"--rdzv={rdzv}: can't listen on port {port}; is it in use? ({error})") from error
    return host, store.port, store


def _parse_rdzv(rdzv: str) -> tuple[str, int]:
    host, _, port = rdzv.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ValueError(f"--rdzv={rdzv} must be HOST:PORT with a port between 1 and 65535")
    return host.strip("[]"), int(port)
