"""Shared memory between real ranks: which way is chosen and why, a killed rank, and a whole run that loses one."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from megalite import native
from megalite.comm import attach, segment
from megalite.comm.attach import attach_channels
from megalite.comm.collectives import all_gather, all_reduce
from megalite.comm.segment import SHM_DIR
from megalite.config.schema import Comm
from megalite.data.prepare import prepare
from megalite.mesh import Mesh, Sizes
from tests.dist.pool import RankError, mesh_for, run_ranks

pytestmark = pytest.mark.skipif(native.load() is None, reason="needs the compiled extension")


def names(pids: Iterable[int]) -> list[str]:
    """What these processes created in /dev/shm and did not remove; other jobs may run at the same time."""
    wanted = {str(pid) for pid in pids}
    return [path.name for path in SHM_DIR.glob("megalite-*") if path.name.split("-")[2] in wanted]


def plain_mesh(world: int) -> Mesh:
    return mesh_for(Sizes(dp_shard=world // 2, tp=2), cpu_backend="gloo")


def channel_kinds(mesh: Mesh) -> dict[str, bool]:
    """axis -> whether it has a channel, of the axes with collectives and more than one rank."""
    groups = {name: getattr(mesh, name) for name in attach.WITH_COLLECTIVES}
    return {name: group.local is not None for name, group in groups.items() if group.size > 1}


def attached(mesh: Mesh, backend: str) -> Mesh | str:
    try:
        return attach_channels(mesh, Comm(cpu_backend=backend), timeout_s=30.0)
    except ValueError as error:
        return str(error)


def on_one_host(rank: int, world: int) -> None:
    for backend in ("auto", "shm"):
        mesh = attached(plain_mesh(world), backend)
        assert channel_kinds(mesh) == {"world": True, "dp": True, "dp_shard": True, "tp": True}
        assert mesh.dp.local is mesh.dp_shard.local is not mesh.tp.local
        assert mesh.pp_backward.local is None
        x = torch.full((3,), float(rank))
        all_reduce(x, mesh.dp)
        all_reduce(x, mesh.tp)
        assert x.tolist() == [6.0] * 3
        x = torch.full((6, 4), float(rank)).t()  # not in one piece: goes through gloo
        out = torch.empty(2, 3, dtype=torch.bool)
        all_gather(out, torch.full((1, 3), rank % 2 == 0), mesh.tp)
        assert out.tolist() == [[True] * 3, [False] * 3]
    assert attached(plain_mesh(world), "gloo").tp.local is None
    assert names([os.getpid()]) == []


def test_one_host():
    run_ranks(4, on_one_host)


def with_host(rank: int, host: int):
    """Make this rank claim to be on another host."""
    claim = replace(attach._this_rank(), host=(host,), hostname=f"node{host}")
    return mock.patch.object(attach, "_this_rank", return_value=claim)


def on_two_hosts(rank: int, world: int) -> tuple[dict[str, bool], str]:
    with with_host(rank, rank // 2):
        return channel_kinds(attached(plain_mesh(world), "auto")), attached(plain_mesh(world), "shm")


def test_two_hosts_share_within_each():
    for kinds, refusal in run_ranks(4, on_two_hosts):
        assert kinds == {"world": False, "dp": False, "dp_shard": False, "tp": True}
        assert refusal == (
            "comm.cpu_backend=shm is not possible: ranks 0 and 2 are not on one host or not in one container "
            "(node0 and node1); use comm.cpu_backend=auto or gloo"
        )


def with_room(num_bytes: int):
    """A /dev/shm that has room for segments up to a size."""
    create = segment.create

    def limited(wanted: int) -> str:
        if wanted > num_bytes:
            raise OSError(28, "No space left on device")
        return create(wanted)

    return mock.patch.object(segment, "create", limited)


def in_little_memory(rank: int, world: int) -> tuple:
    mesh = plain_mesh(world)
    with with_room(300_000):  # world: 4 ranks with 2 slots and results
        small = attached(mesh, "shm")
    x = torch.full((100_000,), float(rank))
    all_reduce(x, small.world)
    assert x.unique().tolist() == [6.0]
    with with_room(3000):
        none, refusal = attached(mesh, "auto"), attached(mesh, "shm")
    assert names([os.getpid()]) == []
    return channel_kinds(small), channel_kinds(none), refusal


def test_a_small_dev_shm_gets_small_slots_and_a_full_one_none():
    for small, none, refusal in run_ranks(4, in_little_memory):
        assert set(small.values()) == {True}
        assert set(none.values()) == {False}
        assert refusal.startswith("comm.cpu_backend=shm is not possible: no shared memory on rank 0 of 4: No space")


def without_extension(rank: int, world: int) -> tuple:
    missing = "the compiled extension is missing (no compiler)" if rank == 1 else None
    with mock.patch.object(attach, "shared_memory_missing", return_value=missing):
        return channel_kinds(attached(plain_mesh(world), "auto")), attached(plain_mesh(world), "shm")


def test_one_rank_without_the_extension():
    for kinds, refusal in run_ranks(2, without_extension):
        assert set(kinds.values()) == {False}
        assert "on rank 1, the compiled extension is missing (no compiler); use" in refusal


def on_a_gpu(rank: int, world: int) -> tuple:
    mesh = replace(plain_mesh(world), device=torch.device("cuda"))
    return channel_kinds(attached(mesh, "auto")), attached(mesh, "shm")


def test_gpu_ranks_keep_their_process_groups():
    for kinds, refusal in run_ranks(2, on_a_gpu):
        assert set(kinds.values()) == {False}
        assert refusal.startswith("comm.cpu_backend=shm is for CPU ranks, these are on cuda")


def killed_in_a_loop(rank: int, world: int, folder: Path, after_s: float) -> None:
    group = attached(plain_mesh(world), "shm").world
    x = torch.ones(200_000)
    all_reduce(x, group)
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    if rank == 1:
        threading.Timer(after_s, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    try:
        while True:
            all_reduce(x.fill_(1.0), group, site="here")
    except RuntimeError as error:
        (folder / f"rank{rank}").write_text("\n".join([str(error), *error.__notes__]))
        raise


@pytest.mark.parametrize("after_s", [0.0, 0.013, 0.04])
def test_a_killed_rank_is_named_by_all_others(tmp_path, after_s):
    """Each other rank sees the death itself, or reads what the first one said of it."""
    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(4, killed_in_a_loop, tmp_path, after_s)
    pid = (tmp_path / "pid1").read_text()
    for rank in (0, 2, 3):
        text = (tmp_path / f"rank{rank}").read_text()
        seen = rf"rank 1 died \(pid {pid}\); rank \d waited for it in all_reduce \(sum\) of 200000 x float32 over "
        assert re.search(f"^({seen}|rank {rank} can't do all_reduce.*out of step since: {seen})", text), text
        assert text.endswith("\nat call site here")
    assert names(int((tmp_path / f"pid{rank}").read_text()) for rank in range(4)) == []


CONFIG = """
model: {family: llama, num_layers: 2, hidden_size: 32, num_heads: 4, ffn_size: 48, vocab_size: 257, max_seq_len: 16}
mesh: {tp: 2}
batch: {global_batch_size: 4, micro_batch_size: 2, seq_len: 16}
precision: {compute: fp32}
data: {train: [{path: docs}], split: [100, 0, 0]}
comm: {cpu_backend: shm}
run: {dir: run, steps: 100000, device: cpu, timeout_s: 300}
"""


def children(pid: int) -> dict[str, int]:
    """RANK -> pid of the ranks below a launcher."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            env = dict(v.split("=", 1) for v in (entry / "environ").read_text().split("\0") if "=" in v)
        except (OSError, ValueError):
            continue
        if parent == pid and "RANK" in env:
            found[env["RANK"]] = int(entry.name)
    return found


def test_a_run_that_loses_a_rank_ends_with_its_name_and_leaves_nothing(tmp_path):
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "text.txt").write_text("".join(f"{i * i} is the square of {i}.\n" for i in range(400)))
    prepare([str(tmp_path / "text.txt")], tokenizer="byte", output=str(tmp_path / "docs"), workers=1)
    root = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-m", "megalite", "launch", "c.yaml"]
    env = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "err", "wb") as err:
        job = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, stderr=err)
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        limit = time.monotonic() + 60
        while not (metrics.exists() and metrics.stat().st_size) and job.poll() is None and time.monotonic() < limit:
            time.sleep(0.05)
        ranks = children(job.pid)
        assert set(ranks) == {"0", "1"}, (tmp_path / "err").read_text()
        assert names(ranks.values()) == []  # no name is left while it runs
        os.kill(ranks["1"], signal.SIGKILL)
        began = time.monotonic()
        assert job.wait(30) == 1
        assert time.monotonic() - began < 30
    finally:
        job.kill()
        job.wait()
    said = (tmp_path / "err").read_text()
    assert "rank 1 of" in said
    assert "SIGKILL" in said or "rank 1 died" in said
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())
    assert names(ranks.values()) == []
