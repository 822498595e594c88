"""The work's model in plain torch, cut into pipeline stages; parameter names are megalite's logical names.

Attention and MLP are modules of their own, so that torch's tensor parallel plans can gather their input once; heads are
counted from the width of what the projections return, so that it also runs on a rank's share of the heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.rows import Work


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    """Causal self-attention with rotary embedding (rotate-half)."""

    def __init__(self, work: Work, tables: tuple[Tensor, Tensor]):
        super().__init__()
        self.head_dim = work.hidden_size // work.num_heads
        self.q, self.k, self.v, self.out = (_linear(work.hidden_size, work.hidden_size) for _ in range(4))
        self.tables = tables

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        shape = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (project(x).view(shape).transpose(1, 2) for project in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def rotate(self, x: Tensor) -> Tensor:
        """RoPE on (B, heads, S, H)."""
        cos, sin = self.tables
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, work: Work):
        super().__init__()
        self.gate, self.up = (_linear(work.hidden_size, work.ffn_size) for _ in range(2))
        self.down = _linear(work.ffn_size, work.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Norm, attention, norm, MLP."""

    def __init__(self, work: Work, tables: tuple[Tensor, Tensor]):
        super().__init__()
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(work.hidden_size, eps=work.norm_eps) for _ in range(2))
        self.attention = Attention(work, tables)
        self.mlp = Mlp(work)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Stage(nn.Module):
    """Stage `index` of `num_stages`, with an equal share of the blocks; the first embeds, the last has the head."""

    def __init__(self, work: Work, index: int, num_stages: int):
        super().__init__()
        share = work.num_layers // num_stages
        tables = rope_tables(work)
        self.embedding = self.final_norm = self.head = None
        if index == 0:
            self.embedding = nn.ModuleDict({"word": nn.Embedding(work.vocab_size, work.hidden_size)})
        numbers = range(index * share, (index + 1) * share)
        self.layers = nn.ModuleDict({str(number): Block(work, tables) for number in numbers})
        if index == num_stages - 1:
            self.final_norm = nn.RMSNorm(work.hidden_size, eps=work.norm_eps)
            self.head = _linear(work.hidden_size, work.vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, S) or rows (B, S, D) -> rows, or logits (B, S, V)."""
        if self.embedding is not None:
            x = self.embedding["word"](x)
        for block in self.layers.values():
            x = block(x)
        return x if self.head is None else self.head(self.final_norm(x))

    def load(self, weights: str) -> None:
        """Copy this stage's share of the weights saved by logical name."""
        saved = torch.load(weights, mmap=True)
        self.load_state_dict({name: saved[name] for name in self.state_dict()})


def rope_tables(work: Work) -> tuple[Tensor, Tensor]:
    """cos and sin, (S, H) each."""
    head_dim = work.hidden_size // work.num_heads
    frequency = work.rope_theta ** -(torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.arange(work.seq_len)[:, None] * frequency
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def param_groups(modules: list[nn.Module], work: Work) -> list[dict]:
    """Matrices are decayed, norms are not, as megalite does."""
    params = [param for module in modules for param in module.parameters()]
    groups = ((lambda p: p.dim() > 1, work.weight_decay), (lambda p: p.dim() == 1, 0.0))
    return [{"params": [p for p in params if keep(p)], "weight_decay": decay} for keep, decay in groups]
