"""The text of an sbatch script for a config: one task per rank, saved and queued again before the time limit.

SLURM sends USR1 to the script 120 s before the end; the script passes it to the ranks, which save and exit with 3; that
queues the job again, and checkpoint.resume=auto goes on from there.
"""

import re
import shlex
from collections.abc import Sequence
from pathlib import PurePath

from megalite.config.schema import Config

GPUS_PER_NODE = 8

BODY = """\
cd "$SLURM_SUBMIT_DIR" || exit 1
export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export MASTER_PORT="$((15000 + SLURM_JOB_ID % 15000))"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONUNBUFFERED=1

stopping=""
trap 'stopping=1; scancel --signal=USR1 "$SLURM_JOB_ID"' USR1  # to the ranks, not to this script
srun --kill-on-bad-exit=0 --wait=120 {command} &
ranks=$!
wait "$ranks"
code=$?
if [ -n "$stopping" ]; then  # the signal ended the wait, not the ranks
  wait "$ranks"
  code=$?
fi
if [ "$code" -eq 3 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def sbatch_text(config: Config, arguments: Sequence[str], *, nnodes: int = 1, python: str = "python") -> str:
    """An sbatch script that trains `arguments` (the config's path, then overrides) on the config's mesh.

    Args:
        nnodes: nodes to ask for; with 1, as few nodes of 8 GPUs as the mesh needs.
    """
    nodes, per_node = _split(config.world_size, nnodes)
    gpus = [] if config.run.device == "cpu" else [f"gpus-per-node={per_node}"]
    options = [
        f"job-name=megalite-{re.sub(r'[^A-Za-z0-9_.-]', '-', PurePath(config.run.dir).name)}",
        f"nodes={nodes}",
        f"ntasks-per-node={per_node}",
        *gpus,
        "exclusive",
        "signal=B:USR1@120",
        "requeue",
        "open-mode=append",
        "output=%x-%j.log",
    ]
    head = "\n".join(["#!/bin/bash", *(f"#SBATCH --{option}" for option in options)])
    command = shlex.join([python, "-m", "megalite", "train", *arguments])
    return f"{head}\n\n{BODY.replace('{command}', command)}"


def _split(world: int, nnodes: int) -> tuple[int, int]:
    """Nodes and ranks per node."""
    nodes = nnodes if nnodes > 1 else -(-world // GPUS_PER_NODE)
    if world % nodes:
        raise ValueError(
            f"{world} ranks (mesh.pp x mesh.dp x mesh.tp) do not spread evenly over {nodes} nodes; "
            f"give --nnodes a divisor of {world}, or make the mesh a multiple of {GPUS_PER_NODE}"
        )
    return nodes, world // nodes
