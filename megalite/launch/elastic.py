"""The ranks of this node under torchrun's elastic agent, without restarts: started together, ended together.

The agent watches its children; when one fails it sends SIGTERM to the others and SIGKILL after a limit. What a rank
has to say about its failure goes into an error file (`errors.py`), so that the report can name the cause and not what
followed from it.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
POLL_S = 0.1


@dataclass(frozen=True)
class Failure:
    """One rank's end as the agent saw it: exit code (minus the signal's number) and when it was noticed (time.time)."""

    rank: int
    pid: int
    code: int
    time_s: float


@dataclass(frozen=True)
class Ended:
    """How this node's ranks ended: failures by rank, and the signal that this launcher was sent, if any."""

    failures: tuple[Failure, ...] = ()
    signal: int | None = None


@dataclass(frozen=True)
class Node:
    """This node's part of the job. `rdzv` is HOST:PORT of node 0, or None for a job on one node."""

    nproc: int
    nnodes: int = 1
    node_rank: int = 0
    rdzv: str | None = None


def run_ranks(command: Sequence[str], node: Node, *, variables: Mapping[str, str], limit_s: float) -> Ended:
    """Run `command` once per rank of this node, with torchrun's variables, and wait for all of them.

    Args:
        variables: set for every rank, on top of this process's environment.
        limit_s:   for the rendezvous, and from a SIGTERM of the others until their SIGKILL.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # its banner says less than our report
    program = ["env", *(f"{name}={value}" for name, value in variables.items()), *command]
    try:
        elastic_launch(_config(node, limit_s), program[0])(*program[1:])
    except ChildFailedError as error:
        first = node.node_rank * node.nproc
        return Ended(tuple(_failure(rank, first, f) for rank, f in error.failures.items()))
    except SignalException as error:
        return Ended(signal=int(error.sigval))
    return Ended()


def _config(node: Node, limit_s: float) -> LaunchConfig:
    static = node.rdzv is not None
    wanted = {
        "min_nodes": node.nnodes,
        "max_nodes": node.nnodes,
        "nproc_per_node": node.nproc,
        "run_id": "megalite",
        "rdzv_backend": "static" if static else "c10d",
        "rdzv_endpoint": node.rdzv if static else "127.0.0.1:0",
        "rdzv_configs": {"rank": node.node_rank, "timeout": limit_s} if static else {"timeout": limit_s},
        "local_addr": None if static else "127.0.0.1",
        "max_restarts": 0,
        "monitor_interval": POLL_S,
        "signals_to_handle": SIGNALS,
        "shutdown_timeout": int(limit_s),
    }
    known = {field.name for field in fields(LaunchConfig)}  # the last two came after torch 2.11's first releases
    return LaunchConfig(**{name: value for name, value in wanted.items() if name in known})


def _failure(rank: int, first: int, failure) -> Failure:
    return Failure(first + failure.local_rank, failure.pid, failure.exitcode, float(failure.timestamp))
