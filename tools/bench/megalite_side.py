"""megalite as a contestant: a row's layout as a config, and the trainer's own step."""

from collections import Counter

import torch
import yaml
from torch import Tensor

from bench.data import share
from bench.rows import ROWS, Row, Work
from megalite.batch import Microbatch
from megalite.comm.attach import attach_channels
from megalite.config.load import check
from megalite.config.schema import Config
from megalite.mesh import Mesh, build_mesh
from megalite.train.build import build as build_trainer
from megalite.train.build import sizes_of
from megalite.train.logical import full_params
from megalite.train.step import train_step

TIMEOUT_S = 300.0


def config_of(row: Row, work: Work, variant: str = "") -> Config:
    """The row's layout as a config.

    Args:
        variant: `section.key=value` of comm or overlap, separated by spaces.
    """
    model = {name: getattr(work, name) for name in ("num_layers", "hidden_size", "num_heads", "ffn_size", "vocab_size")}
    model |= {"family": "llama", "max_seq_len": work.seq_len, "norm_eps": work.norm_eps, "rope_theta": work.rope_theta}
    zero: dict = {"stage": row.zero}
    if row.zero == 3:
        zero |= {"reshard_after": row.reshard_after, "reduce_each": "step"}
    values = {
        "model": model,
        "mesh": {"pp": row.pp, "dp": row.dp, "tp": row.tp},
        "pipeline": {"schedule": row.schedule, "virtual": row.virtual},
        "zero": zero,
        "batch": {"global_batch_size": work.global_batch_size, "micro_batch_size": row.micro_batch_size},
        "precision": {"compute": "fp32"},
        "optimizer": {
            "name": "adamw",
            "betas": list(work.betas),
            "eps": work.eps,
            "weight_decay": work.weight_decay,
            "clip_norm": 0.0,
        },
        "run": {"device": "cpu", "seed": work.seed, "timeout_s": TIMEOUT_S},
    }
    for override in variant.split():
        name, _, value = override.partition("=")
        section, _, key = name.partition(".")
        values.setdefault(section, {})[key] = yaml.safe_load(value)
    return check(values, {}, name=f"row {row.name}")


class Trainer:
    """One rank."""

    def __init__(self, row: Row, work: Work, variant: str, weights: str):
        self.row, self.work = row, work
        config = config_of(row, work, variant)  # its initial weights are the ones in `weights`
        self.trainer = build_trainer(config, self.make_mesh(config))

    def make_mesh(self, config: Config) -> Mesh:
        """This rank's groups."""
        device = torch.device("cpu")
        mesh = build_mesh(sizes_of(config), device=device, timeout_s=TIMEOUT_S, kv_replicas=config.kv_replicas)
        return attach_channels(mesh, config.comm, timeout_s=TIMEOUT_S)

    def step(self, tokens: Tensor, labels: Tensor, number: int) -> float:
        """Train on a global batch; returns its mean loss."""
        dp, micro = self.trainer.mesh.dp, self.row.micro_batch_size
        tokens, labels = (share(whole, dp.rank, dp.size) for whole in (tokens, labels))
        start = dp.rank * len(tokens)
        batches = [
            Microbatch(tokens[i : i + micro], labels[i : i + micro], sample_start=start + i, step=number)
            for i in range(0, len(tokens), micro)
        ]
        return train_step(self.trainer, batches, lr=self.work.lr).loss

    def finish(self) -> None:
        """Wait for the gathers that stages 1 and 2 leave to run under the next step."""
        self.trainer.zero.finish_gathers()

    def traffic(self) -> Counter:
        """What this rank has sent so far, by the ledger: payload bytes without headers by `axis op`."""
        total: Counter = Counter()
        for entry, num_bytes in self.trainer.mesh.ledger.sent_bytes.items():
            total[f"{entry.axis} {entry.op}"] += num_bytes
        return total


def save_weights(work: Work, path: str) -> None:
    """Write the initial weights by logical name, for the other contestants."""
    one = next(row for row in ROWS if row.world_size == 1)
    params = full_params(Trainer(one, work, "", path).trainer)
    torch.save({name: value.clone() for name, value in params.items()}, path)
