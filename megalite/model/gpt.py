"""The GPT as a chain of links: embedding, one link per block, head.

A link maps the rows of the residual stream that this rank holds to the next link's; the pipeline runtime runs the
chain and knows nothing of what a link computes. The embedding takes None, the head returns the loss per token.
"""

import torch
from torch import Tensor, nn

from megalite.batch import Microbatch
from megalite.model.attention import Attention
from megalite.model.context import ModelContext
from megalite.model.dropout import residual_dropout
from megalite.model.mlp import Mlp
from megalite.model.norm import make_norm
from megalite.model.positions import RopeTables
from megalite.parallel.spec import ParamSpec
from megalite.parallel.tp.begun import Steps, in_turns
from megalite.parallel.tp.embedding import LearnedPositions, VocabParallelEmbedding
from megalite.parallel.tp.linear import ColumnParallelLinear
from megalite.parallel.tp.loss import begin_all_rows, vocab_parallel_linear_cross_entropy
from megalite.parallel.tp.specs import replicated_reduce, slab, whole


class Link(nn.Module):
    """One step of the chain.

    unit_names:   the ZeRO units whose parameters it reads.
    recomputable: the runtime may keep only its input and run it again before its backward.
    recomputes:   and shall do so.
    backward_reads: its backward needs the values of its parameters.
    """

    backward_reads = True
    recomputable = False
    recomputes = False

    def __init__(self, context: ModelContext, *unit_names: str):
        super().__init__()
        self.context = context
        self.unit_names = unit_names

    def forward(self, x: Tensor | None, batch: Microbatch) -> Tensor:
        """The next link's input. With batch parts rows are the parts' one after the other, each shared among tp ranks
        by itself."""
        num = self.context.overlap.batch_parts
        if num == 1:
            return in_turns([self.steps(x, batch)])[0]
        rows = [None] * num if x is None else x.chunk(num)
        return torch.cat(in_turns([self.steps(*part) for part in zip(rows, batch.parts(num), strict=True)]))

    def steps(self, x: Tensor | None, batch: Microbatch) -> Steps:
        """`forward` of one part."""
        raise NotImplementedError


class EmbeddingLink(Link):
    """Word embedding, learned positions if the model has them, dropout."""

    backward_reads = False  # rows are added to a gradient, nothing is looked up

    def __init__(self, context: ModelContext):
        tied, learned = context.model.tie_embeddings, context.model.position == "learned"
        super().__init__(context, *(["embedding"] if learned or not tied else []), *(["tied"] if tied else []))
        spec = vocab_spec("embedding.word.weight", context, tied=tied)
        self.word = VocabParallelEmbedding(
            spec, tp=context.tp, dtype=context.dtype, site="embedding", padding=context.vocab_padding
        )
        self.position = make_positions(context) if learned else None

    def steps(self, x: Tensor | None, batch: Microbatch) -> Steps:
        """None -> (rows, D)."""
        assert x is None, "the embedding is the first link"
        finish = self.word.begin(batch.tokens.reshape(-1))
        yield
        y = finish()
        if self.position is not None:
            y = self.position(y, num_rows=batch.rows, seq_len=batch.tokens.shape[1])
        return residual_dropout(y, "embedding", context=self.context, batch=batch) if self.training else y


class Block(Link):
    """A transformer block: norm, attention, norm, MLP, each branch added to the residual stream."""

    recomputable = True

    def __init__(self, layer: int, context: ModelContext, rope_tables: RopeTables | None):
        super().__init__(context, f"layers.{layer}")
        self.layer = layer
        self.recomputes = "full" in context.recompute_ops(layer)
        self.attention_norm = make_norm(f"layers.{layer}.attention_norm", context)
        self.attention = Attention(layer, context, rope_tables)
        self.mlp_norm = make_norm(f"layers.{layer}.mlp_norm", context)
        self.mlp = Mlp(layer, context)

    def steps(self, x: Tensor, batch: Microbatch) -> Steps:
        """(rows, D) -> (rows, D)."""
        normed, x = self.attention_norm.beside(x)
        branch = yield from self.attention.steps(normed, batch)
        normed, x = self.mlp_norm.after_add(self._drop(branch, "attention", batch), x)
        branch = yield from self.mlp.steps(normed)
        return self._drop(branch, "mlp", batch).add_(x)

    def _drop(self, branch: Tensor, which: str, batch: Microbatch) -> Tensor:
        if not self.training:
            return branch
        return residual_dropout(branch, f"layers.{self.layer}.{which}.residual", context=self.context, batch=batch)


class HeadLink(Link):
    """Final norm, projection to the vocabulary, cross entropy per token."""

    def __init__(self, context: ModelContext):
        tied = context.model.tie_embeddings
        super().__init__(context, "head", *(["tied"] if tied else []))
        self.final_norm = make_norm("final_norm", context)
        name = "embedding.word.weight" if tied else "head.weight"
        spec = vocab_spec(name, context, tied=tied, tied_copy=tied)
        self.output = ColumnParallelLinear(
            spec, None, tp=context.tp, dtype=context.dtype, site="head", padding=context.vocab_padding
        )

    def steps(self, x: Tensor, batch: Microbatch) -> Steps:
        """(rows, D) -> loss per token (M,), the same on all ranks of tp; 0 where the label is IGNORE."""
        finish = begin_all_rows(self.final_norm(x), tp=self.context.tp)
        yield
        return vocab_parallel_linear_cross_entropy(
            finish(),
            self.output.weight,
            batch.labels.reshape(-1),
            tp=self.context.tp,
            vocab_size=self.context.model.vocab_size,
            impl=self.context.kernels["linear_cross_entropy"],
            wgrad=self.context.kernels["wgrad"],
        )


def vocab_spec(name: str, context: ModelContext, *, tied: bool = False, tied_copy: bool = False) -> ParamSpec:
    """This rank's slice of a (V, D) tensor; the rows of padding are not part of it."""
    model, rows = context.model, context.padded_vocab // context.tp.size
    start = min(context.tp.rank * rows, model.vocab_size)
    part = slab(name, (model.vocab_size, model.hidden_size), dim=0, start=start, size=rows - context.vocab_padding)
    kind = "embedding" if name.startswith("embedding") else "linear"
    return ParamSpec((part,), kind, init_std=model.init_std, tied=tied, tied_copy=tied_copy)


def make_positions(context: ModelContext) -> LearnedPositions:
    """The learned position table."""
    model = context.model
    part = whole("embedding.position.weight", (model.max_seq_len, model.hidden_size), tp=context.tp)
    spec = ParamSpec((part,), "embedding", init_std=model.init_std, tp_reduce=replicated_reduce(context.tp))
    return LearnedPositions(spec, tp=context.tp, dtype=context.dtype)
