"""CPU speed of megalite's kernels against torch, side by side in one run: medians of alternated runs, one thread.

Sections: adamw (tools/bench_adamw.py), linear_ce (time and peak memory of the fused head against logits and
cross_entropy), step (a whole training step against the same model in plain torch). A ratio above 1 is in our favour;
`goal` is what the project promises. `--tiny` tests this file, not the speed.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import bench_adamw  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from plain_gpt import PlainGpt, plain_step  # noqa: E402

from megalite.batch import Microbatch  # noqa: E402
from megalite.config.schema import Config  # noqa: E402
from megalite.kernels.bench import medians  # noqa: E402
from megalite.kernels.linear_cross_entropy import linear_cross_entropy  # noqa: E402
from megalite.mesh import single_device_mesh  # noqa: E402
from megalite.train.build import build  # noqa: E402
from megalite.train.step import train_step  # noqa: E402

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Row:
    """One comparison, in seconds or bytes; ratio = theirs / ours."""

    name: str
    ours: float
    theirs: float
    unit: str
    goal: float

    @property
    def ratio(self) -> float:
        """How many times better ours is."""
        return self.theirs / self.ours


@dataclass(frozen=True)
class Sizes:
    """Of the head and of the model."""

    rows: int = 4096
    width: int = 512
    vocab: int = 32000
    num_layers: int = 8
    hidden: int = 256
    num_heads: int = 8
    num_kv_heads: int = 4
    ffn: int = 704
    seq_len: int = 256
    model_vocab: int = 4096
    batch: int = 16


TINY = Sizes(
    rows=8,
    width=16,
    vocab=64,
    num_layers=1,
    hidden=32,
    num_heads=2,
    num_kv_heads=1,
    ffn=48,
    seq_len=8,
    model_vocab=64,
    batch=2,
)


def head_inputs(sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight, targets of a head."""
    torch.manual_seed(0)
    x = torch.randn(sizes.rows, sizes.width, requires_grad=True)
    weight = (0.02 * torch.randn(sizes.vocab, sizes.width)).requires_grad_()
    return x, weight, torch.randint(sizes.vocab, (sizes.rows,))


def fused_head(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> None:
    """Ours, forward and backward of the mean."""
    linear_cross_entropy(x, weight, targets).mean().backward()


def plain_head(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> None:
    """Logits, then torch's cross entropy."""
    F.cross_entropy(F.linear(x, weight), targets).backward()


HEADS = {"ours": fused_head, "theirs": plain_head}


def high_water_bytes() -> int:
    """Most memory this process ever had resident; ru_maxrss would include the process that started it."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


def head_peak_bytes(which: str, sizes: Sizes) -> int:
    """How far one forward and backward raises the most memory that this process ever had; for a fresh process."""
    torch.set_num_threads(1)
    HEADS[which](*head_inputs(TINY))  # loads code and libraries
    inputs = head_inputs(sizes)
    before = high_water_bytes()
    HEADS[which](*inputs)
    return high_water_bytes() - before


def linear_ce(sizes: Sizes, rounds: int) -> list[Row]:
    """Time, and peak memory beyond the inputs, each measured in a process of its own."""
    inputs = head_inputs(sizes)

    def run(which: str) -> Callable[[], None]:
        def once() -> None:
            inputs[0].grad = inputs[1].grad = None
            HEADS[which](*inputs)

        return once

    times = medians({which: run(which) for which in HEADS}, CPU, rounds=rounds)
    context = get_context("spawn")
    with context.Pool(1, maxtasksperchild=1) as pool:
        peaks = {which: pool.apply(head_peak_bytes, (which, sizes)) for which in HEADS}
    name = f"linear_ce {sizes.rows}x{sizes.width}x{sizes.vocab}"
    return [
        Row(f"{name} time", times["ours"], times["theirs"], "s", 1.0),
        Row(f"{name} peak memory", max(1, peaks["ours"]), peaks["theirs"], "B", 4.0),
    ]


def our_config(sizes: Sizes) -> Config:
    """The model of the step section."""
    return Config.model_validate({
        "model": {
            "family": "llama", "num_layers": sizes.num_layers, "hidden_size": sizes.hidden,
            "num_heads": sizes.num_heads, "num_kv_heads": sizes.num_kv_heads, "ffn_size": sizes.ffn,
            "vocab_size": sizes.model_vocab, "max_seq_len": sizes.seq_len,
        },
        "batch": {"global_batch_size": sizes.batch, "micro_batch_size": sizes.batch},
        "precision": {"compute": "fp32"},
    })  # fmt: skip


def step(sizes: Sizes, rounds: int) -> list[Row]:
    """Forward, backward, clip and AdamW on the same tokens; the models have the same parameters in number and shape."""
    torch.manual_seed(0)
    config = our_config(sizes)
    trainer = build(config, single_device_mesh())
    plain = PlainGpt(config.model)
    ours, theirs = (sum(p.numel() for m in models for p in m.parameters()) for models in (trainer.stages, [plain]))
    assert ours == theirs, f"{ours} parameters against {theirs}"
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    tokens = torch.randint(sizes.model_vocab, (sizes.batch, sizes.seq_len + 1))
    batch = Microbatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None, sample_start=0)
    functions = {
        "ours": lambda: train_step(trainer, [batch], lr=3e-4),
        "theirs": lambda: plain_step(plain, optimizer, batch.tokens, batch.labels),
    }
    times = medians(functions, CPU, rounds=rounds)
    name = f"step {sizes.num_layers}x{sizes.hidden}, batch {sizes.batch}x{sizes.seq_len}"
    return [Row(name, times["ours"], times["theirs"], "s", 1.1)]


def adamw(sizes: Sizes, rounds: int) -> list[Row]:
    """tools/bench_adamw.py has its own sizes."""
    found = bench_adamw.rows(rounds=rounds, **({"elements": 5000} if sizes == TINY else {}))
    return [Row(row.name, row.ours_s, row.torch_s, "s", row.target) for row in found]


SECTIONS = {"adamw": adamw, "linear_ce": linear_ce, "step": step}


def table(rows: list[Row]) -> str:
    """For people."""
    lines = [f"{'':44} {'ours':>12} {'torch':>12} {'ratio':>7} {'goal':>6}"]
    for row in rows:
        scale, unit = (1e3, "ms") if row.unit == "s" else (1e-6, "MB")
        numbers = f"{row.ours * scale:9.1f} {unit} {row.theirs * scale:9.1f} {unit} {row.ratio:6.2f}x {row.goal:5.2f}x"
        lines.append(f"{row.name:44} {numbers}{'' if row.ratio >= row.goal else '  below the goal'}")
    return "\n".join(lines)


def main() -> int:
    """Measure and print; the exit code does not judge speeds, which depend on what else the machine does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    sizes = TINY if options.tiny else Sizes()
    rows = [row for name in options.sections or SECTIONS for row in SECTIONS[name](sizes, options.rounds)]
    print(table(rows))
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(row) | {"ratio": row.ratio} for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
