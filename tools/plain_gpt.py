"""A Llama-like GPT as one writes it in plain torch, for benchmarks: separate projections, eager ops, torch's AdamW."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config.schema import Model


class PlainBlock(nn.Module):
    """RMSNorm, attention, RMSNorm, SwiGLU."""

    def __init__(self, model: Model):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = model.num_heads, model.num_kv_heads, model.head_dim
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.attention_norm = nn.RMSNorm(model.hidden_size, eps=model.norm_eps)
        self.q = nn.Linear(model.hidden_size, width, bias=False)
        self.k = nn.Linear(model.hidden_size, kv_width, bias=False)
        self.v = nn.Linear(model.hidden_size, kv_width, bias=False)
        self.out = nn.Linear(width, model.hidden_size, bias=False)
        self.mlp_norm = nn.RMSNorm(model.hidden_size, eps=model.norm_eps)
        self.gate = nn.Linear(model.hidden_size, model.ffn_size, bias=False)
        self.up = nn.Linear(model.hidden_size, model.ffn_size, bias=False)
        self.down = nn.Linear(model.ffn_size, model.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Causal, with grouped kv heads."""
        shape = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (project(x).view(shape).transpose(1, 2) for project in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return self.out(y.transpose(1, 2).reshape(*x.shape[:2], -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate-half, as transformers has it."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class PlainGpt(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, model: Model):
        super().__init__()
        self.embedding = nn.Embedding(model.vocab_size, model.hidden_size)
        self.blocks = nn.ModuleList(PlainBlock(model) for _ in range(model.num_layers))
        self.norm = nn.RMSNorm(model.hidden_size, eps=model.norm_eps)
        self.head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)
        for param in self.parameters():
            if param.dim() == 2:
                nn.init.normal_(param, std=model.init_std)
        frequency = model.rope_theta ** -(torch.arange(0, model.head_dim, 2).float() / model.head_dim)
        angles = torch.arange(model.max_seq_len)[:, None] * frequency
        self.register_buffer("cos", torch.cat([angles, angles], dim=-1).cos())
        self.register_buffer("sin", torch.cat([angles, angles], dim=-1).sin())

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, S) -> logits (B, S, V)."""
        x = self.embedding(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def plain_step(model: PlainGpt, optimizer: torch.optim.Optimizer, tokens: Tensor, labels: Tensor) -> float:
    """One training step with clipping; returns the loss, as a training loop logs it."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()
