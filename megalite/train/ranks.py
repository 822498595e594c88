"""Which rank this process is: from torchrun's variables, from srun's, or alone.

Invariant: either every setting agrees or a ValueError names the variable at fault; nothing is guessed from half a set.
Takes the environment as a mapping (cli.py reads it), so it is a pure function of its argument.
"""

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

SLURM_PORTS = (15000, 15000)
"""First port and number of ports that jobs under srun draw from: below the ephemeral range of Linux."""


@dataclass(frozen=True)
class Place:
    """One rank's place in the job. `master_*` is where the ranks meet; None in a job of one rank.

    agent_store: the launcher already listens at master_port, so rank 0 must not.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    agent_store: bool = False

    @property
    def init_method(self) -> str:
        """The address for torch.distributed.init_process_group (pass rank and world_size too)."""
        host = f"[{self.master_addr}]" if self.master_addr and ":" in self.master_addr else self.master_addr
        return f"tcp://{host}:{self.master_port}"


def rank_from_env(env: Mapping[str, str]) -> Place:
    """The place that torchrun or srun gave this process; the only rank of a job when neither started it.

    torchrun's variables win over srun's, as torchrun may itself run under srun.

    Raises:
        ValueError: a variable is missing, not a number, out of range, or contradicts another.
    """
    if any(name in env for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        place = _from_torchrun(env)
    elif "SLURM_PROCID" in env:
        place = _from_srun(env)
    else:
        return Place()
    _check(place, slurm="RANK" not in env)
    return place


def check_port_free(place: Place) -> None:
    """Refuse a meeting port that another program holds; only rank 0 of a job without a launcher's store looks."""
    if place.rank != 0 or place.world_size == 1 or place.agent_store:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", place.master_port))
        except OSError as error:
            raise ValueError(
                f"MASTER_PORT={place.master_port} is not free on {socket.gethostname()} ({error.strerror}); "
                "end the other job or set MASTER_PORT to another port on every rank"
            ) from error


def first_host(nodelist: str) -> str:
    """The first host of a SLURM node list: `gpu[003-010,012],login1` gives gpu003."""
    entry = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    if entry is None:
        raise ValueError(f"SLURM_NODELIST={nodelist!r} holds no host name")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", entry[0])


def _from_torchrun(env: Mapping[str, str]) -> Place:
    world_size = _number(env, "WORLD_SIZE")
    alone = world_size == 1 and "MASTER_ADDR" not in env
    return Place(
        rank=_number(env, "RANK"),
        local_rank=_number(env, "LOCAL_RANK"),
        world_size=world_size,
        local_world_size=_number(env, "LOCAL_WORLD_SIZE", default=world_size),
        master_addr=None if alone else _text(env, "MASTER_ADDR"),
        master_port=None if alone else _number(env, "MASTER_PORT"),
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _from_srun(env: Mapping[str, str]) -> Place:
    world_size = _number(env, "SLURM_NTASKS")
    place = Place(
        rank=_number(env, "SLURM_PROCID"),
        local_rank=_number(env, "SLURM_LOCALID"),
        world_size=world_size,
        local_world_size=_tasks_on_node(env, world_size),
        master_addr=env.get("MASTER_ADDR") or _slurm_head(env, world_size),
        master_port=_number(env, "MASTER_PORT") if "MASTER_PORT" in env else _slurm_port(env, world_size),
    )
    return place


def _slurm_head(env: Mapping[str, str], world_size: int) -> str | None:
    """Where rank 0 runs: the first node of the step; the launching node only when no list is given."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if env.get(name):
            return first_host(env[name])
    if world_size == 1:
        return None
    return _text(env, "SLURM_LAUNCH_NODE_IPADDR")


def _slurm_port(env: Mapping[str, str], world_size: int) -> int | None:
    """A port that all ranks of a step derive alike, and that two jobs on one node rarely share."""
    if world_size == 1 and "SLURM_JOB_ID" not in env:
        return None
    first, num = SLURM_PORTS
    return first + (_number(env, "SLURM_JOB_ID") + 1009 * _number(env, "SLURM_STEP_ID", default=0)) % num


def _tasks_on_node(env: Mapping[str, str], world_size: int) -> int:
    """This node's entry of `8(x3),4`; all tasks when SLURM says nothing."""
    name = next((n for n in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") if n in env), None)
    if name is None:
        return _number(env, "SLURM_NTASKS_PER_NODE", default=world_size)
    tasks: list[int] = []
    for entry in env[name].split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
        if found is None:
            raise ValueError(f"{name}={env[name]!r} is not a list such as 8(x3),4")
        tasks += [int(found[1])] * int(found[2] or 1)
    node = _number(env, "SLURM_NODEID", default=0)
    if node >= len(tasks):
        raise ValueError(f"SLURM_NODEID={node} has no entry in {name}={env[name]!r}")
    return tasks[node]


def _text(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        present = sorted(n for n in env if n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS"))
        raise ValueError(
            f"{name} is not set but {', '.join(present)} {'are' if len(present) > 1 else 'is'}; "
            "start the ranks with `megalite launch`, torchrun or srun, or set all of them"
        )
    return env[name]


def _number(env: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    if default is not None and name not in env:
        return default
    text = _text(env, name)
    if not re.fullmatch(r"\d+", text):
        raise ValueError(f"{name}={text!r} is not a whole number >= 0")
    return int(text)


def _check(place: Place, *, slurm: bool) -> None:
    rank, world, local = (
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID") if slurm else ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    )
    if place.rank >= place.world_size:
        raise ValueError(f"{rank}={place.rank} must be less than {world}={place.world_size}")
    if place.local_world_size > place.world_size:
        raise ValueError(f"{place.local_world_size} ranks on this node, but {world}={place.world_size} in all")
    if place.local_rank >= place.local_world_size:
        raise ValueError(f"{local}={place.local_rank} must be less than the node's {place.local_world_size} ranks")
    if place.master_port is not None and not 0 < place.master_port < 2**16:
        raise ValueError(f"MASTER_PORT={place.master_port} must be between 1 and 65535")
