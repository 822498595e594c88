"""What rank 0 writes of a run: config.yaml, metrics.jsonl, the progress on the console, loss.png and the summary."""

from pathlib import Path

from rich.console import Console

from megalite.config.load import dump
from megalite.config.schema import Config
from megalite.mesh import Mesh
from megalite.observe.flops import ModelShape, flops_per_token, rates, recompute_flops_per_token
from megalite.observe.hardware import device_name, peak_flops, peak_memory_gb
from megalite.observe.metrics import MetricsWriter, read_metrics
from megalite.observe.plot import plot_loss
from megalite.observe.progress import Progress, summary_table
from megalite.observe.traffic import Sent, sent_so_far, traffic_table
from megalite.train.step import StepResult
from megalite.train.trace import Traced


def model_shape(config: Config) -> ModelShape:
    """The sizes that FLOPs follow from."""
    model = config.model
    return ModelShape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        ffn_size=model.ffn_size,
        vocab_size=model.vocab_size,
        gated=model.activation == "swiglu",
    )


def layout_name(config: Config) -> str:
    """tp 2 x pp 2 (interleaved, 2 chunks) x dp 2 (ZeRO-3)."""
    pipeline, mesh = config.pipeline, config.mesh
    chunks = f", {pipeline.virtual} chunks" if pipeline.virtual > 1 else ""
    pp = f"pp {mesh.pp} ({pipeline.schedule}{chunks})" if config.num_stages > 1 else "pp 1"
    split = f" = {config.dp_replicate} x {config.dp_shard}" if config.dp_replicate > 1 else ""
    return f"tp {mesh.tp} x {pp} x dp {config.dp}{split} (ZeRO-{config.zero.stage})"


def _shares(traced: Traced) -> str:
    return traced.shares.text() if traced.shares else "too many spans"


class Reporter:
    """Lives on rank 0 for one run; use it in a `with`."""

    def __init__(self, config: Config, mesh: Mesh, *, start: int):
        self.config = config
        self.mesh = mesh
        self.directory = Path(config.run.dir)
        self.console = Console()
        self.checkpoint: Path | None = None
        self.sent: Sent = {}
        """By this rank in the last step."""
        self.traces: list[Traced] = []
        seq_len, shape = config.batch.seq_len, model_shape(config)
        self.step_tokens = config.batch.global_batch_size * seq_len
        self.model_flops = flops_per_token(shape, seq_len)
        again = [config.recompute_ops(layer) for layer in range(config.model.num_layers)]
        self.recompute_flops = recompute_flops_per_token(shape, seq_len, layers=again)
        self.peak = peak_flops(device_name(mesh.device), compute=config.precision.compute)
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "config.yaml").write_text(dump(config), encoding="utf-8")
        events = self.directory / "tensorboard" if config.run.tensorboard else None
        self.metrics = MetricsWriter(self.directory / "metrics.jsonl", after_step=start, tensorboard_dir=events)
        self.progress = Progress(config.run.steps, start_step=start, console=self.console)

    def __enter__(self) -> "Reporter":
        self.progress.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.progress.__exit__(*exc_info)
        self.metrics.close()

    def step(self, step: int, result: StepResult, *, lr: float, time_s: float) -> None:
        """Write and show one training step; `time_s` is the step alone, without evaluation and saving."""
        speed = rates(
            self.step_tokens,
            time_s,
            num_ranks=self.mesh.sizes.world,
            model_flops=self.model_flops,
            recompute_flops=self.recompute_flops,
            peak=self.peak,
        )
        record = {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "tokens": step * self.step_tokens,
            "samples": step * self.config.batch.global_batch_size,
            "skipped": result.skipped,
            "step_time_s": time_s,
            "tokens_per_s": speed.tokens_per_s,
            "tflops_per_rank": speed.tflops_per_rank,
            "mfu": speed.mfu,
            "hfu": speed.hfu,
            "memory_gb": peak_memory_gb(self.mesh.device),
            "comm_bytes": self.mesh.ledger.by_axis(),
        }
        self.sent = sent_so_far(self.mesh.ledger)
        self.metrics.write_step(record)
        self.progress.step(record)

    def evaluation(self, step: int, loss: float) -> None:
        """Write and show one evaluation."""
        record = {"step": step, "eval_loss": loss}
        self.metrics.write_eval(record)
        self.progress.evaluation(record)

    def traced(self, traced: Traced) -> None:
        """Remember and show where the time of a traced step went."""
        self.traces.append(traced)
        self.progress.note(f"trace of step {traced.step}: {_shares(traced)}; {traced.path}")

    def saved(self, path: Path) -> None:
        """Remember and show where a checkpoint went."""
        self.checkpoint = path
        self.progress.note(f"checkpoint {path}")

    def finish(self) -> None:
        """Draw loss.png and print the summary and the traffic of a step; after the live line has ended."""
        records = read_metrics(self.directory / "metrics.jsonl")
        paths = {"metrics": str(self.metrics.path)}
        if any(r.get("loss") is not None for r in records):
            paths["plot"] = str(plot_loss(records, self.directory / "loss.png", title=layout_name(self.config)))
        for traced in self.traces:
            text = f"{_shares(traced)}\n{traced.path}, {traced.path.with_suffix('.png')}"
            paths[f"shares of step {traced.step}"] = text
        if self.checkpoint:
            paths["checkpoint"] = str(self.checkpoint)
        self.console.print(summary_table(records, title=layout_name(self.config), paths=paths))
        if self.sent:
            self.console.print(traffic_table(self.sent, title="sent by rank 0 in the last step"))
