"""What tools/bench_train.py compares: the work, the layouts (one row each) and the contestants of a row. Plain data.

Invariant: all contestants of a row train the same weights on the same tokens in the same layout and micro batches. Two
exceptions: DDP, which shards nothing, also stands in the ZeRO-1 row, since it is what torch offers at those bytes; and
what stands beside a row (Row.beside) has a layout of its own.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Work:
    """The model (Llama-like: RMSNorm, rope, SwiGLU, untied, no biases), the batch and AdamW's settings."""

    num_layers: int = 8
    hidden_size: int = 256
    num_heads: int = 8
    ffn_size: int = 768
    vocab_size: int = 4096
    seq_len: int = 256
    global_batch_size: int = 16
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    seed: int = 1234

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a global batch."""
        return self.global_batch_size * self.seq_len

    def text(self) -> str:
        """One line for the reports."""
        return (
            f"{self.num_layers} layers, hidden {self.hidden_size}, {self.num_heads} heads, ffn {self.ffn_size}, seq "
            f"{self.seq_len}, vocab {self.vocab_size}, global batch {self.global_batch_size}, fp32, AdamW, no clipping"
        )


TINY = Work(num_layers=4, hidden_size=32, num_heads=4, ffn_size=64, vocab_size=128, seq_len=32)


@dataclass(frozen=True)
class Contestant:
    """One implementation of a row. `side` is a module of this folder, `variant` what it shall use of its library."""

    label: str
    side: str
    variant: str = ""
    alone: bool = False
    """In one process, whatever the row's layout is."""

    @property
    def ours(self) -> bool:
        """Whether it is megalite."""
        return self.side == "megalite_side"


MEGALITE = Contestant("megalite", "megalite_side")
"""By default collectives of ranks on one host go through shared memory, which is no network."""
MEGALITE_GLOO = Contestant("megalite on gloo", "megalite_side", "comm.cpu_backend=gloo")
"""As the opponents: everything on the wire."""


@dataclass(frozen=True)
class Row:
    """One layout. With pp, or where micro batches are smaller than a rank's share, a step has several microbatches."""

    name: str
    title: str
    opponents: tuple[Contestant, ...]
    dp: int = 1
    tp: int = 1
    pp: int = 1
    schedule: str = "1f1b"
    virtual: int = 1
    zero: int = 0
    reshard_after: str = "forward"
    micro_batch_size: int = 16
    beside: tuple[Contestant, ...] = ()
    """Take turns too and are compared with, but are no opponents."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp

    @property
    def contestants(self) -> tuple[Contestant, ...]:
        """megalite first; on gloo too where there are collectives (messages between stages are gloo's anyway). Who only
        stands beside comes last."""
        return (MEGALITE, *([MEGALITE_GLOO] if self.dp * self.tp > 1 else []), *self.opponents, *self.beside)

    def of(self, contestant: Contestant) -> "Row":
        """The layout that a contestant runs."""
        return replace(ROWS[0], name=self.name) if contestant.alone else self


def _torch(label: str, variant: str = "") -> Contestant:
    return Contestant(f"torch {label}".strip(), "torch_side", variant)


def _deepspeed(stage: int) -> Contestant:
    return Contestant(f"DeepSpeed ZeRO-{stage}", "deepspeed_side")


FSDP = _torch("FSDP2", "fsdp")
DDP = _torch("DDP (ZeRO-0)", "ddp")
DDP_ZERO = _torch("DDP + ZeroRedundancyOptimizer", "ddp_zero")
ONE_PROCESS = Contestant("torch in one process", "torch_side", alone=True)

ROWS = (
    Row("one", "one process", (_torch(""),)),
    Row("dp2-zero1", "dp 2, ZeRO-1", (DDP_ZERO, DDP, _deepspeed(1)), dp=2, zero=1, micro_batch_size=8),
    Row("dp2-zero2", "dp 2, ZeRO-2", (FSDP, _deepspeed(2)), dp=2, zero=2, micro_batch_size=8),
    Row("dp2-zero3", "dp 2, ZeRO-3", (FSDP, _deepspeed(3)), dp=2, zero=3, micro_batch_size=8),
    Row("tp2", "tp 2 + sp", (_torch("DTensor tp + sp"),), tp=2),
    Row("pp2-1f1b", "pp 2, 1f1b", (_torch("Schedule1F1B"),), pp=2, micro_batch_size=2),
    Row(
        "pp2-interleaved",
        "pp 2, interleaved",
        (_torch("ScheduleInterleaved1F1B"),),
        pp=2,
        schedule="interleaved",
        virtual=2,
        micro_batch_size=2,
    ),
    Row("pp2-zbv", "pp 2, zbv", (_torch("ScheduleZBV"),), pp=2, schedule="zbv", virtual=2, micro_batch_size=2),
    Row(
        "2x2x2",
        "pp 2 x dp 2 x tp 2: tp + sp, interleaved, ZeRO-3",
        (_torch("DTensor + FSDP2 + Interleaved1F1B", "fsdp"),),
        dp=2,
        tp=2,
        pp=2,
        schedule="interleaved",
        virtual=2,
        zero=3,
        reshard_after="step",
        micro_batch_size=2,
        beside=(ONE_PROCESS,),
    ),
)
"""reshard_after=step in 2x2x2: both sides keep gathered parameters through the step and reduce once, as torch's
pipeline does with reshard_after_forward=False."""


def selected(names: list[str] | None) -> list[Row]:
    """The rows of these names, in the table's order; all without names. `one` is always there: losses are compared
    with it.

    Raises:
        ValueError: an unknown name.
    """
    known = [row.name for row in ROWS]
    for name in names or ():
        if name not in known:
            raise ValueError(f"--rows {name} is not a row; rows are {', '.join(known)}")
    return [row for row in ROWS if not names or row.name in (*names, "one")]
