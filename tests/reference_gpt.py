"""The oracle: GPT training on one device in plain torch, written to be read and importing nothing of megalite.

A model is a namespace of settings (names and defaults of the config's `model` section, resolved here on its own
account) and a dict of tensors under *logical* names. Every formula is spelled out: no fused op, no module, no
optimizer class. It computes in the dtype of the parameters; tests give it float64.
`tests/unit/test_oracle_transformers.py` holds it against transformers and torch's optimizers.

Conventions: tensors are (B, S, ...); linear weights are (out, in); heads are contiguous rows; RoPE rotates halves;
document masks only cut attention, positions do not restart.
"""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

IGNORE = -100
Params = dict[str, Tensor]


def resolve(**fields) -> SimpleNamespace:
    """Model settings with every default filled in by family."""
    model = {"family": "llama", "norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None}
    model |= {name: value for name, value in fields.items() if value is not None}
    gpt = model["family"] == "gpt"
    D, N = model["hidden_size"], model["num_heads"]
    defaults = {
        "num_kv_heads": N,
        "head_dim": D // N,
        "ffn_size": 4 * D if gpt else 256 * math.ceil(8 * D / 3 / 256),
        "tie_embeddings": gpt,
        "norm": "layernorm" if gpt else "rmsnorm",
        "activation": "gelu" if gpt else "swiglu",
        "position": "learned" if gpt else "rope",
        "bias": gpt,
    }
    return SimpleNamespace(**(defaults | model))


def logical_shapes(model: SimpleNamespace) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter."""
    D, F, H = model.hidden_size, model.ffn_size, model.head_dim
    q, kv = model.num_heads * H, model.num_kv_heads * H
    linears = {"attention.q": (q, D), "attention.k": (kv, D), "attention.v": (kv, D), "attention.out": (D, q)}
    linears |= {"mlp.gate": (F, D)} if model.activation == "swiglu" else {}
    linears |= {"mlp.up": (F, D), "mlp.down": (D, F)}
    shapes: dict[str, tuple[int, ...]] = {"embedding.word.weight": (model.vocab_size, D)}
    if model.position == "learned":
        shapes["embedding.position.weight"] = (model.max_seq_len, D)
    norms = ["final_norm"]
    for i in range(model.num_layers):
        norms += [f"layers.{i}.attention_norm", f"layers.{i}.mlp_norm"]
        for name, shape in linears.items():
            shapes[f"layers.{i}.{name}.weight"] = shape
            if model.bias:
                shapes[f"layers.{i}.{name}.bias"] = shape[:1]
    for name in norms:
        shapes[f"{name}.weight"] = (D,)
        if model.norm == "layernorm":
            shapes[f"{name}.bias"] = (D,)
    if not model.tie_embeddings:
        shapes["head.weight"] = (model.vocab_size, D)
    return shapes


def kind(name: str) -> str:
    """What weight decay looks at: linear, embedding, norm or bias."""
    if "norm." in name:
        return "norm"
    if name.endswith(".bias"):
        return "bias"
    return "embedding" if name.startswith("embedding.") else "linear"


def random_params(model: SimpleNamespace, seed: int, std: float = 0.1) -> Params:
    """Float64 parameters with nothing at a special value: norms near one, biases not zero."""
    generator = torch.Generator().manual_seed(seed)
    params = {}
    for name, shape in sorted(logical_shapes(model).items()):
        mean = 1.0 if kind(name) == "norm" and name.endswith(".weight") else 0.0
        params[name] = mean + std * torch.randn(shape, generator=generator, dtype=torch.float64)
    return params


def linear(params: Params, name: str, x: Tensor) -> Tensor:
    """x W^T + b."""
    y = x @ params[f"{name}.weight"].T
    return y + params[f"{name}.bias"] if f"{name}.bias" in params else y


def norm(params: Params, name: str, x: Tensor, model: SimpleNamespace) -> Tensor:
    """LayerNorm or RMSNorm over the last dim."""
    if model.norm == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + model.norm_eps)
    x = x * params[f"{name}.weight"]
    return x + params[f"{name}.bias"] if model.norm == "layernorm" else x


def rope_frequencies(model: SimpleNamespace, dtype: torch.dtype) -> Tensor:
    """(H/2,) angles per position. Su et al., arXiv:2104.09864; llama3: the three bands of Llama 3.1."""
    frequencies = model.rope_theta ** (-torch.arange(0, model.head_dim, 2, dtype=dtype) / model.head_dim)
    scaling = model.rope_scaling
    if scaling is None:
        return frequencies
    if scaling["type"] == "linear":
        return frequencies / scaling["factor"]
    turns = scaling["original_max_seq_len"] * frequencies / (2 * math.pi)  # within the original context
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # 0: fully stretched, 1: as it was
    return (1 - kept) * frequencies / scaling["factor"] + kept * frequencies


def rotate(x: Tensor, model: SimpleNamespace) -> Tensor:
    """RoPE on (B, S, heads, H): the pair (x[i], x[i + H/2]) turns by position * frequency[i]."""
    positions = torch.arange(x.shape[1], dtype=x.dtype)
    angles = torch.outer(positions, rope_frequencies(model, x.dtype))[:, None, :]  # (S, 1, H/2)
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attention(params: Params, name: str, x: Tensor, documents: Tensor | None, model: SimpleNamespace) -> Tensor:
    """softmax(Q K^T / sqrt(H) + mask) V, causal, within documents; each kv head serves N/K query heads."""
    B, S, _ = x.shape
    q, k, v = (linear(params, f"{name}.{part}", x).view(B, S, -1, model.head_dim) for part in "qkv")
    if model.position == "rope":
        q, k = rotate(q, model), rotate(k, model)
    group = model.num_heads // model.num_kv_heads
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scores = torch.einsum("bqnh,bknh->bnqk", q, k) / math.sqrt(model.head_dim)
    allowed = torch.ones(S, S, dtype=torch.bool).tril()
    if documents is not None:
        allowed = allowed & (documents[:, None, :, None] == documents[:, None, None, :])
    weights = torch.softmax(scores.masked_fill(~allowed, -math.inf), dim=-1)
    mixed = torch.einsum("bnqk,bknh->bqnh", weights, v).reshape(B, S, -1)
    return linear(params, f"{name}.out", mixed)


def mlp(params: Params, name: str, x: Tensor, model: SimpleNamespace) -> Tensor:
    """SwiGLU (arXiv:2002.05202) or the tanh form of GELU."""
    up = linear(params, f"{name}.up", x)
    if model.activation == "swiglu":
        gate = linear(params, f"{name}.gate", x)
        hidden = gate * torch.sigmoid(gate) * up
    else:
        hidden = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
    return linear(params, f"{name}.down", hidden)


def logits(params: Params, model: SimpleNamespace, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
    """(B, S, V) scores of the next token."""
    x = params["embedding.word.weight"][tokens]
    if model.position == "learned":
        x = x + params["embedding.position.weight"][: tokens.shape[1]]
    for i in range(model.num_layers):
        block = f"layers.{i}"
        x = x + attention(
            params, f"{block}.attention", norm(params, f"{block}.attention_norm", x, model), documents, model
        )
        x = x + mlp(params, f"{block}.mlp", norm(params, f"{block}.mlp_norm", x, model), model)
    x = norm(params, "final_norm", x, model)
    head = "embedding.word" if model.tie_embeddings else "head"
    return x @ params[f"{head}.weight"].T


def forward(
    params: Params, model: SimpleNamespace, tokens: Tensor, labels: Tensor, documents: Tensor | None = None
) -> Tensor:
    """(B, S) cross entropy of each label, 0 where it is IGNORE."""
    scores = logits(params, model, tokens, documents)
    target = scores.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return torch.where(labels == IGNORE, 0.0, torch.logsumexp(scores, dim=-1) - target)


@dataclass
class Step:
    """One optimizer step: the mean loss, norm and gradients before clipping, and the new parameters."""

    loss: float
    grad_norm: float
    grads: Params
    params: Params


def gradients(params: Params, model: SimpleNamespace, batch: dict[str, Tensor]) -> tuple[float, Params]:
    """Mean loss over the batch's trained tokens, and its gradient; a parameter that got none has zeros."""
    leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
    losses = forward(leaves, model, batch["tokens"], batch["labels"], batch.get("documents"))
    loss = losses.sum() / (batch["labels"] != IGNORE).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return loss.item(), dict(zip(leaves, grads, strict=True))


def train_steps(
    params: Params, model: SimpleNamespace, batches: list[dict[str, Tensor]], *, optimizer: dict, lrs: list[float]
) -> list[Step]:
    """Train on whole global batches, one per step, at the given learning rates.

    Args:
        batches: per step `tokens`, `labels` (B, S) and perhaps `documents`, B the global batch size.
        optimizer: settings of the config's `optimizer` section; those left out have its defaults.
    """
    settings = {
        "name": "adamw",
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "momentum": 0.0,
        "weight_decay": 0.1,
        "clip_norm": 1.0,
    }
    settings |= {"decay": ("linear", "embedding")} | optimizer
    update = {"adamw": adamw, "sgd": sgd}[settings["name"]]
    state: dict[str, Params] = {"first": {}, "second": {}}
    steps = []
    for number, (batch, lr) in enumerate(zip(batches, lrs, strict=True), start=1):
        loss, grads = gradients(params, model, batch)
        grad_norm = math.sqrt(sum(grad.square().sum().item() for grad in grads.values()))
        clip = min(1.0, settings["clip_norm"] / (grad_norm + 1e-6)) if settings["clip_norm"] > 0 else 1.0
        new = {}
        for name, value in params.items():
            decay = settings["weight_decay"] if kind(name) in settings["decay"] else 0.0
            new[name] = value * (1 - lr * decay) - lr * update(name, clip * grads[name], state, number, settings)
        params = new
        steps.append(Step(loss, grad_norm, grads, params))
    return steps


def adamw(name: str, grad: Tensor, state: dict[str, Params], number: int, settings: dict) -> Tensor:
    """Adam's direction at step `number` (from 1). Loshchilov and Hutter, arXiv:1711.05101."""
    beta1, beta2 = settings["betas"]
    zero = torch.zeros_like(grad)
    first = state["first"][name] = beta1 * state["first"].get(name, zero) + (1 - beta1) * grad
    second = state["second"][name] = beta2 * state["second"].get(name, zero) + (1 - beta2) * grad * grad
    return (first / (1 - beta1**number)) / ((second / (1 - beta2**number)).sqrt() + settings["eps"])


def sgd(name: str, grad: Tensor, state: dict[str, Params], number: int, settings: dict) -> Tensor:
    """The gradient, or with momentum the sum of past gradients, each decayed by momentum per step."""
    first = state["first"][name] = settings["momentum"] * state["first"].get(name, torch.zeros_like(grad)) + grad
    return first
