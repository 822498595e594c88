"""One rank of a run, from its environment to its exit code."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist

from megalite.checkpoint.keep import resolve
from megalite.comm.attach import attach_channels
from megalite.config.schema import Config
from megalite.data.loader import build_loader
from megalite.mesh import Mesh, build_mesh, check_world_size
from megalite.observe.log import get_logger, setup_logging
from megalite.observe.metrics import require_tensorboard
from megalite.observe.outputs import check_output_folder
from megalite.train.build import build, check_plan, sizes_of
from megalite.train.loop import Loaders, run_loop
from megalite.train.ranks import Place, check_port_free, rank_from_env
from megalite.train.report import Reporter, layout_name
from megalite.train.signals import StopFlag
from megalite.train.state import checkpoint_root, load_state

STOPPED = 3
"""Exit code of a run that a signal ended after saving."""


def run(config: Config, env: Mapping[str, str]) -> int:
    """Train as the rank that `env` (torchrun's, srun's, or none: the only rank) says this process is.

    Returns:
        0 when run.steps are done, 3 when a signal stopped the run after saving.

    Raises:
        ValueError: the user's input does not fit the job, the data or the checkpoint; before the first step.
    """
    place = rank_from_env(env)
    setup_logging(place.rank)
    check_world_size(sizes_of(config), place.world_size)
    if config.run.tensorboard:
        require_tensorboard()
    check_plan(config)
    check_output_folder(f"run.dir={config.run.dir}", config.run.dir)
    stop = StopFlag()
    with process_group(config, place) as device:
        stop.install()  # not earlier: nothing is to be saved, and who waits for the others must obey a signal
        mesh = build_mesh(
            sizes_of(config), device=device, timeout_s=config.run.timeout_s, kv_replicas=config.kv_replicas
        )
        mesh = attach_channels(mesh, config.comm, timeout_s=config.run.timeout_s)
        return train(config, mesh, stop)


def train(config: Config, mesh: Mesh, stop: StopFlag) -> int:
    """Build, resume, train and report on an existing mesh; returns the exit code (0 or 3)."""
    loaders = build_loaders(config, mesh)
    trainer = build(config, mesh)
    source = resolve(config.checkpoint.resume, checkpoint_root(config), group=mesh.world)
    start = load_state(trainer, source) if source else 0
    _announce(config, loaders, source, start)
    if start >= config.run.steps:
        get_logger().info("nothing to do: %s is at step %d of run.steps=%d", source, start, config.run.steps)
        return 0
    with Reporter(config, mesh, start=start) if mesh.rank == 0 else nullcontext() as reporter:
        finished = run_loop(trainer, loaders, reporter, start=start, stop=stop)
    if reporter:
        reporter.finish()
    return 0 if finished else STOPPED


def build_loaders(config: Config, mesh: Mesh) -> Loaders:
    """The loaders of this rank's data parallel index."""
    at = {"dp_rank": mesh.dp.rank, "dp_size": mesh.dp.size}
    valid = build_loader(config, "valid", **at) if config.data.split[1] > 0 else None
    return Loaders(build_loader(config, "train", **at), valid)


def _announce(config: Config, loaders: Loaders, source: object, start: int) -> None:
    log = get_logger()
    log.info("%s, %d microbatches of %d x %d tokens a rank", layout_name(config), config.batch.num_microbatches,
             config.batch.micro_batch_size, config.batch.seq_len)  # fmt: skip
    log.info("data: %s", loaders.train.describe())
    if source:
        log.info("resuming from %s after step %d", source, start)


@contextmanager
def process_group(config: Config, place: Place) -> Iterator[torch.device]:
    """The default process group (none for a single rank), with the run's time-out; yields this rank's device."""
    device = pick_device(config.run.device, place)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if place.world_size == 1:
        yield device
        return
    check_port_free(place)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method="env://" if place.agent_store else place.init_method,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=config.run.timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    yield device
    dist.destroy_process_group()  # not after an error: a dead peer could make it wait; see end_now in launch/child.py


def pick_device(wanted: str, place: Place) -> torch.device:
    """cpu, or this rank's GPU.

    Raises:
        ValueError: run.device=cuda without CUDA, or more local ranks than visible GPUs.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("run.device=cuda, but torch sees no GPU here; use run.device=cpu or auto")
    num_gpus = torch.cuda.device_count()
    if num_gpus == 1 and place.local_world_size > 1 and place.local_rank > 0:
        return torch.device("cuda", 0)  # the launcher shows each task its own GPU
    if place.local_rank >= num_gpus:
        raise ValueError(
            f"local rank {place.local_rank} has no GPU: {num_gpus} visible for {place.local_world_size} ranks on this "
            f"node; start at most {num_gpus} ranks a node, or show every rank its GPU"
        )
    return torch.device("cuda", place.local_rank)
