"""The configuration: frozen pydantic sections, one per part of megalite.

Field rules live on the fields; rules that join sections live in `rules.py`. An unknown key is an error. Fields left out
that follow from others (the family's defaults, the third of the batch sizes) are filled while an object is built, so
that readers find concrete values; nothing changes afterwards. Sizes that follow from several sections are properties
of `Config`.
"""

from dataclasses import fields
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from megalite.config.fields import (
    Flag,
    NonNegative,
    Positive,
    PositiveReal,
    Probability,
    Real,
    Section,
    Seed,
    Share,
)
from megalite.config.overlap import Overlap
from megalite.config.pipeline import equal_sizes, layout_sizes
from megalite.config.recompute import Recompute, recompute_ops
from megalite.observe.flops import ModelShape


class RopeScaling(Section):
    """How rotary frequencies are stretched to longer contexts."""

    type: Literal["linear", "llama3"] = "llama3"
    """linear: positions / factor. llama3: the three-band rule of Llama 3.1."""
    factor: Real = Field(8.0, ge=1.0)
    """Stretch factor."""
    low_freq_factor: Real = Field(1.0, gt=0)
    """llama3: wavelengths longer than original_max_seq_len / this are fully stretched."""
    high_freq_factor: Real = Field(4.0, gt=0)
    """llama3: wavelengths shorter than original_max_seq_len / this are kept."""
    original_max_seq_len: Positive = 8192
    """llama3: the context length of the unscaled model."""


def _family(value: Any) -> Any:
    """Accept the published names of the two families."""
    return {"gpt2": "gpt", "gpt3": "gpt", "llama2": "llama", "llama3": "llama"}.get(value, value)


FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt": {"norm": "layernorm", "activation": "gelu", "position": "learned", "bias": True, "tie_embeddings": True},
    "llama": {"norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False, "tie_embeddings": False},
}


def _default_ffn_size(family: str, hidden_size: int) -> int:
    """4 D, or as many parameters with the three matrices of SwiGLU: 8/3 D up to a multiple of 256."""
    return 4 * hidden_size if family == "gpt" else -(-8 * hidden_size // (3 * 256)) * 256


class Model(Section):
    """The GPT: what it computes, the same for every layout. Fields left out follow the family."""

    family: Annotated[Literal["gpt", "llama"], BeforeValidator(_family)] = "llama"
    """gpt: LayerNorm, GELU, learned positions, biases. llama: RMSNorm, SwiGLU, rope, no biases."""
    num_layers: Positive
    """Transformer blocks."""
    hidden_size: Positive
    """D, the width of the residual stream."""
    num_heads: Positive
    """Query heads."""
    num_kv_heads: Positive | None = None
    """Key/value heads (GQA); default num_heads."""
    head_dim: Positive | None = None
    """Default hidden_size / num_heads."""
    ffn_size: Positive | None = None
    """Default 4 * hidden_size (gpt), 8/3 * hidden_size rounded up to a multiple of 256 (llama)."""
    vocab_size: Positive
    """Logical vocabulary; storage is padded for tp, which never changes the loss."""
    max_seq_len: Positive
    """Longest sequence; with learned positions also the size of their table."""
    tie_embeddings: Flag | None = None
    """The head uses the embedding's weight; default true (gpt), false (llama)."""
    norm: Literal["layernorm", "rmsnorm"] | None = None
    """Default by family."""
    norm_eps: Real = Field(1e-5, gt=0)
    """Added to the variance."""
    activation: Literal["gelu", "swiglu"] | None = None
    """Default by family. gelu is the tanh form of GPT-2."""
    position: Literal["learned", "rope"] | None = None
    """Default by family."""
    rope_theta: Real = Field(10000.0, gt=0)
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Default none."""
    bias: Flag | None = None
    """Biases in linear layers; default true (gpt), false (llama)."""
    dropout: Probability = 0.0
    """On the embedding output and on both residual branches."""
    attention_dropout: Probability = 0.0
    """On attention weights; above 0 the attention is computed explicitly (memory B*N*S*S)."""
    init_std: Real = Field(0.02, gt=0)
    """Std of linear and embedding weights; residual outputs use init_std / sqrt(2 * num_layers)."""
    frozen: tuple[str, ...] = ()
    """Patterns of logical names that are never updated, e.g. [embedding.*, layers.0.*, "*.attention.k.weight"]."""

    @model_validator(mode="after")
    def _fill_from_family(self) -> Self:
        filled = FAMILY_DEFAULTS[self.family] | {
            "num_kv_heads": self.num_heads,
            "head_dim": max(1, self.hidden_size // self.num_heads),
            "ffn_size": _default_ffn_size(self.family, self.hidden_size),
        }
        self._fill(**{name: value for name, value in filled.items() if getattr(self, name) is None})
        return self


class DpSplit(Section):
    """A data parallel axis split in two: replicas of sharded groups (HSDP)."""

    replicate: Positive = 1
    """Copies of the sharded state."""
    shard: Positive = 1
    """Ranks that share one copy of the sharded state."""


def _dp_form(value: Any) -> str:
    return "split" if isinstance(value, dict | DpSplit) else "size"


DpSize = Annotated[
    Annotated[Positive, Tag("size")] | Annotated[DpSplit, Tag("split")],
    Discriminator(_dp_form),
]


class MeshSection(Section):
    """Sizes of the mesh axes; their product is the number of ranks. tp is the fastest axis."""

    pp: Positive = 1
    """Pipeline parallel size."""
    dp: DpSize = 1
    """Data parallel size (all of it shards), or {replicate: R, shard: S}."""
    tp: Positive = 1
    """Tensor parallel size."""
    sequence_parallel: Flag = True
    """Shard activations between tp layers over their rows; no effect at tp = 1."""


class Pipeline(Section):
    """The pipeline schedule."""

    schedule: str = "1f1b"
    """gpipe | 1f1b | interleaved | zb_h1 | zb_h2 | zbv | v_half | dualpipe_v, or the path of a .csv file with one line
    of F, B, I, W actions per pp rank (see `megalite schedule`)."""
    virtual: Positive = 1
    """Chunks per rank: any number for interleaved, 2 for zbv, v_half and dualpipe_v, what a file has, else 1."""
    layers: tuple[NonNegative, ...] | None = None
    """Blocks per stage, pp*virtual numbers that sum to num_layers; default as equal as possible, see stage_layers."""
    layout: str | None = None
    """The same as text, `E,2*B|3*B|3*B|2*B,H`: stages joined by |, of E (embedding), n*B (blocks), H (head); or auto:
    stages of equal FLOPs, the head counted."""
    costs: tuple[PositiveReal, PositiveReal, PositiveReal, Share] | None = None
    """What zb_h2 is made for: lengths of a stage's forward, input gradient, weight gradient and of a message, in any
    unit, as a trace shows them. Default 1, 1, 1, 0."""


class Zero(Section):
    """What is sharded over the data parallel axis."""

    stage: Literal[0, 1, 2, 3] = 1
    """0 nothing, 1 optimizer state, 2 + gradients, 3 + parameters."""
    reshard_after: Literal["forward", "microbatch", "step"] = "microbatch"
    """Stage 3: when gathered parameters are freed."""
    reduce_each: Literal["microbatch", "step"] | None = None
    """When gradients are reduced; default microbatch for stages 2 and 3, else step."""
    max_live_bytes: Positive | None = None
    """Stage 3: bound on the gathered parameters of a rank; prefetches wait for room. Default none."""
    offload_optimizer: Literal["none", "cpu"] = "none"
    """Where the optimizer state lives and is updated: none is the device, cpu the host's memory."""
    offload_main: Flag = False
    """With offload_optimizer: cpu the main params too; the device keeps the compute copy only."""

    @model_validator(mode="after")
    def _fill_from_stage(self) -> Self:
        if self.reduce_each is None:
            self._fill(reduce_each="microbatch" if self.stage >= 2 else "step")
        return self


class Batch(Section):
    """global_batch_size = micro_batch_size * num_microbatches * dp; give any two."""

    global_batch_size: Positive | None = None
    """Sequences per optimizer step over all ranks."""
    micro_batch_size: Positive | None = None
    """Sequences that one rank moves through the model at once."""
    num_microbatches: Positive | None = None
    """Microbatches per step and data parallel rank."""
    seq_len: Positive | None = None
    """Tokens per sequence; default model.max_seq_len."""


class Precision(Section):
    """Number formats. Main params and main grads are fp32 (fp64 with compute fp64)."""

    compute: Literal["bf16", "fp32", "fp64"] = "bf16"
    """Parameters and activations in forward and backward."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """What gradients are cast to for the reduction over dp (fp64 stays fp64)."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """The optimizer's moments. fp32: as the main params. bf16: half the memory, rounded up or down at random so that
    averages stay exact."""


class Optimizer(Section):
    """The update rule, applied to each rank's shard of the fp32 main params."""

    name: Literal["adamw", "sgd"] = "adamw"
    """sgd is plain, with optional momentum; it shows constant-factor faults that Adam hides."""
    betas: tuple[Probability, Probability] = (0.9, 0.95)
    """AdamW's decay rates."""
    eps: Real = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    momentum: Probability = 0.0
    """SGD's momentum."""
    weight_decay: Real = Field(0.1, ge=0)
    """Decoupled weight decay."""
    decay: tuple[Literal["linear", "embedding", "norm", "bias"], ...] = ("linear", "embedding")
    """Kinds of parameters that are decayed."""
    clip_norm: Real = Field(1.0, ge=0)
    """Global gradient norm limit; 0 switches clipping off."""
    implementation: Literal["auto", "reference", "native", "triton", "cuda", "apex"] = "auto"
    """Of AdamW and the gradient norm. auto: cuda or triton on a GPU, native (C++) on the CPU, else reference."""


class Lr(Section):
    """Learning rate over steps: a linear warm-up, then the schedule."""

    peak: Real = Field(3e-4, ge=0)
    """Rate after the warm-up."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """wsd: constant, then a linear decay over the last decay_steps."""
    warmup_steps: NonNegative = 0
    """Steps of linear warm-up; step 1 uses peak / warmup_steps."""
    min_ratio: Real = Field(0.1, ge=0, le=1)
    """Final rate / peak."""
    decay_steps: Positive | None = None
    """linear, cosine: step at which the end is reached (default run.steps). wsd: length of the decay (default 10%)."""


class Source(Section):
    """One prepared corpus."""

    path: str
    """Prefix of a .bin/.idx pair, or builtin:docs | builtin:stdlib (made from this Python on first use)."""
    weight: Real = Field(1.0, gt=0)
    """Relative share of samples."""


class Data(Section):
    """What is trained on."""

    train: tuple[Source, ...] = ()
    """Corpora and their weights."""
    split: tuple[Share, Share, Share] = (969.0, 30.0, 1.0)
    """Relative sizes of the train, valid and test parts of each corpus, by documents."""
    seed: Seed = 1
    """Seed of the sample order."""
    document_mask: Flag = False
    """Attention does not cross end-of-document tokens."""
    eod_id: NonNegative | None = None
    """The end-of-document token; needed by document_mask. Default: what the corpus records."""
    mask_eod_loss: Flag = False
    """Targets that follow an end-of-document token are not trained on."""


class Checkpoint(Section):
    """Saving and resuming."""

    every_steps: NonNegative = 0
    """Save interval; 0: only at the end of the run."""
    keep_last: Positive = 3
    """Older complete checkpoints are deleted."""
    resume: str = "auto"
    """auto: the newest complete checkpoint of run.dir if there is one; none; or a checkpoint's path."""


class Run(Section):
    """This run."""

    dir: str = "runs/default"
    """Where config.yaml, metrics.jsonl, checkpoints/ and loss.png go."""
    steps: Positive = 100
    """Optimizer steps."""
    seed: Seed = 1234
    """Seed of initial weights and dropout."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda when there is one."""
    timeout_s: Real = Field(600.0, gt=0)
    """Limit of every collective and every wait."""
    eval_every: NonNegative = 0
    """Steps between evaluations; 0: only at the end."""
    eval_batches: Positive = 4
    """Global batches per evaluation."""
    tensorboard: Flag = False
    """Also write TensorBoard events."""
    trace: Flag = False
    """Write the measured timeline of trace_steps into dir/trace/, as Chrome/Perfetto traces and pictures."""
    trace_steps: tuple[Positive, Positive] | None = None
    """First and last step to trace; default the third and the fourth that this start runs."""
    check_replicas_every: NonNegative = 0
    """Steps between comparisons of all copies that ranks hold of the same numbers; 0: never."""


class Comm(Section):
    """Communication."""

    cpu_backend: Literal["auto", "gloo", "shm"] = "auto"
    """Transport of collectives between CPU ranks. shm: shared memory, for ranks of one host. auto: shm for the groups
    that can, else gloo."""
    cuda_backend: Literal["auto", "nccl", "symm"] = "auto"
    """Transport of collectives between GPUs. symm: our kernels over NVLink, for the groups within one host, with sums
    in fp32 and in rank order (in the switch's order where it adds). auto: nccl, until symm was timed over NVLink."""


class Kernels(Section):
    """Which implementation each op uses: auto | reference | native | triton | cuda | package.module:object.

    auto: the fastest that runs on the device; native is C++ on the CPU. An object of yours offers the functions of the
    op's reference.py and is checked against them before the first step.
    """

    rmsnorm: str = "auto"
    """RMSNorm, with the residual add before it."""
    layernorm: str = "auto"
    """LayerNorm, with the residual add before it."""
    attention: str = "auto"
    """Causal attention from packed q, k and v. The reference is torch's; native rotates q and k in the same pass."""
    rope: str = "auto"
    """Rotary embedding of q and k, where attention does not do it."""
    swiglu: str = "auto"
    """SwiGLU of gate and up."""
    gelu: str = "auto"
    """GELU, tanh form."""
    linear_cross_entropy: str = "auto"
    """The head: projection to the vocabulary and cross entropy in pieces, without whole logits."""
    wgrad: str = "auto"
    """Weight gradients, added into the main gradients."""
    dropout: str = "auto"
    """Dropout with counter-based masks."""


class Config(Section):
    """Everything that defines a run. Built by `load.load_config`, which also applies `rules.problems`."""

    model: Model
    """What is trained."""
    mesh: MeshSection = MeshSection()
    """How many ranks, and along which axes."""
    pipeline: Pipeline = Pipeline()
    """How the pp axis is used."""
    zero: Zero = Zero()
    """How the dp axis is used."""
    batch: Batch
    """How many sequences a step takes, and in which portions."""
    precision: Precision = Precision()
    """Number formats."""
    recompute: Recompute = "none"
    """none | selective (attention and activations) | full (every block) | a list of ops per range of blocks, e.g.
    [{layers: [0, 4], ops: [attention, mlp]}, {layers: [4, 8], ops: full}]."""
    kernels: Kernels = Kernels()
    """Implementations of the model's ops."""
    comm: Comm = Comm()
    """Communication."""
    overlap: Overlap = Overlap()
    """Communication under computation."""
    optimizer: Optimizer = Optimizer()
    """The update rule."""
    lr: Lr = Lr()
    """The learning rate."""
    data: Data = Data()
    """What is trained on."""
    checkpoint: Checkpoint = Checkpoint()
    """Saving and resuming."""
    run: Run = Run()
    """Where, how long, on what."""

    @model_validator(mode="after")
    def _fill_batch(self) -> Self:
        filled = {"seq_len": self.batch.seq_len or self.model.max_seq_len}
        total, micro, num = self.batch.global_batch_size, self.batch.micro_batch_size, self.batch.num_microbatches
        if total is None and micro and num:
            filled["global_batch_size"] = micro * num * self.dp
        elif num is None and total and micro and total % (micro * self.dp) == 0:
            filled["num_microbatches"] = total // (micro * self.dp)
        elif micro is None and total and num and total % (num * self.dp) == 0:
            filled["micro_batch_size"] = total // (num * self.dp)
        self._fill(batch=self.batch.model_copy(update=filled))
        return self

    @property
    def dp_replicate(self) -> int:
        """Copies of the sharded state; 1 unless mesh.dp is split."""
        return self.mesh.dp.replicate if isinstance(self.mesh.dp, DpSplit) else 1

    @property
    def dp_shard(self) -> int:
        """Ranks that share one copy of what zero.stage shards."""
        return self.mesh.dp.shard if isinstance(self.mesh.dp, DpSplit) else self.mesh.dp

    @property
    def dp(self) -> int:
        """Data parallel size, dp_replicate * dp_shard."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.mesh.pp * self.dp * self.mesh.tp

    @property
    def num_stages(self) -> int:
        """Pipeline stages (chunks) over all ranks."""
        return self.mesh.pp * self.pipeline.virtual

    @property
    def sequence_parallel(self) -> bool:
        """Activations between tp layers are sharded over their rows."""
        return self.mesh.sequence_parallel and self.mesh.tp > 1

    @property
    def batch_parts(self) -> int:
        """Parts of a microbatch that take turns in the computation: see config/overlap.py."""
        if self.mesh.tp == 1:
            return 1
        split_rows = self.mesh.tp if self.sequence_parallel else 1
        samples, seq_len = self.batch.micro_batch_size, self.batch.seq_len
        return self.overlap.num_batch_parts(samples=samples, seq_len=seq_len, split_rows=split_rows)

    @property
    def kv_replicas(self) -> int:
        """Neighbouring tp ranks that hold the same kv head; 1 when there are at least tp kv heads."""
        return max(1, self.mesh.tp // self.model.num_kv_heads)

    @property
    def padded_vocab(self) -> int:
        """Rows of the stored word embedding: vocab_size up to a multiple of tp."""
        return -(-self.model.vocab_size // self.mesh.tp) * self.mesh.tp

    @property
    def stage_layers(self) -> tuple[tuple[int, int], ...]:
        """First and last + 1 block of each stage.

        Without pipeline.layers and pipeline.layout each stage has num_layers // num_stages blocks; those that remain go
        one each to the inner stages from the second on, then to the first: the ends also hold the embedding and the
        head.
        """
        sizes = self.pipeline.layers or self._layout_sizes() or equal_sizes(self.model.num_layers, self.num_stages)
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return tuple(zip([0, *ends[:-1]], ends, strict=True))

    def recompute_ops(self, layer: int) -> frozenset[str]:
        """What block `layer` computes again in backward: see config/recompute.py."""
        return recompute_ops(self.recompute, layer)

    def _layout_sizes(self) -> tuple[int, ...] | None:
        """Blocks per stage that pipeline.layout says; None without one."""
        if self.pipeline.layout is None:
            return None
        sizes = self.model.model_dump(include={field.name for field in fields(ModelShape)} - {"gated"})
        shape = ModelShape(**sizes, gated=self.model.activation == "swiglu")
        return layout_sizes(
            self.pipeline.layout,
            shape,
            seq_len=self.batch.seq_len or self.model.max_seq_len,
            num_stages=self.num_stages,
        )
