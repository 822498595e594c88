"""What the model's tests share: small configs, logical tensors from local parameters, one forward and backward."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megalite.batch import IGNORE, Microbatch
from megalite.config.schema import Config
from megalite.mesh import Mesh
from megalite.model.init import init_tensor, materialize
from megalite.model.stage import Stage, build_stages

LLAMA = {"family": "llama", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 48}
GPT = {"family": "gpt", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "ffn_size": 48}
SIZES = {"vocab_size": 101, "max_seq_len": 16, "init_std": 0.2}


def make_config(model: dict[str, Any], *, dtype: str = "fp64", **sections: Any) -> Config:
    """A config with a small model; `sections` as in the schema."""
    values = {"batch": {"global_batch_size": 2, "micro_batch_size": 2}, "precision": {"compute": dtype}}
    return Config.model_validate({"model": SIZES | model} | values | sections)


def make_stages(config: Config, mesh: Mesh, *, seed: int = 7) -> list[Stage]:
    """All stages of the pipeline on this rank, with initial values."""
    stages = build_stages(config, mesh, list(range(config.num_stages)))
    materialize(nn.ModuleList(stages), seed=seed)
    return stages


def jitter(stages: list[Stage]) -> None:
    """Add noise that does not depend on the layout, so that no norm stays one and no bias zero."""
    for param in params_of(stages):
        noise = replace(param.spec, init="normal", init_std=0.1)
        param.data.add_(init_tensor(noise, tuple(param.shape), dtype=param.dtype, device="cpu", seed=8))


def make_batch(config: Config, *, seed: int = 3, documents: bool = False, start: int = 0) -> Microbatch:
    """Random tokens; some labels are not trained on."""
    generator = torch.Generator().manual_seed(seed)
    shape = (config.batch.micro_batch_size, config.batch.seq_len)
    tokens = torch.randint(config.model.vocab_size, shape, generator=generator)
    labels = torch.randint(config.model.vocab_size, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.2] = IGNORE
    ends = (torch.rand(shape, generator=generator) < 0.2).cumsum(1).int()
    return Microbatch(tokens, labels, ends if documents else None, sample_start=start)


def set_main_grads(stages: list[Stage], dtype: torch.dtype) -> None:
    """Give every parameter a zero main gradient, as ZeRO does."""
    for stage in stages:
        for param in stage.parameters():
            param.main_grad = torch.zeros(param.shape, dtype=dtype)


def run(stages: list[Stage], batch: Microbatch, *, full_recompute: bool = False) -> Tensor:
    """Forward and backward link by link with the mean loss over trained tokens; returns the losses per token."""
    links = [link for stage in stages for link in stage.links]
    kept, x = [], None
    for link in links:
        x = x.detach().requires_grad_() if x is not None else None
        again = full_recompute and link.recomputable
        with torch.set_grad_enabled(not again):
            y = link(x, batch)
        kept.append((x, None if again else y))
        x = y
    losses = x.detach()
    grad = torch.full_like(losses, 1.0 / int((batch.labels != IGNORE).sum()))
    for link in reversed(links):
        x, y = kept.pop()
        y = link(x, batch) if y is None else y
        torch.autograd.backward(y, grad)
        grad = x.grad if x is not None else None
    return losses


def params_of(stages: list[Stage]) -> list[nn.Parameter]:
    """Every parameter once."""
    return list(nn.ModuleList(stages).parameters())


def boxes(stages: list[Stage], *, grads: bool = False) -> list[tuple[Any, Tensor]]:
    """(part, values of its box) of every parameter, or of its main gradient."""
    found = []
    for param in params_of(stages):
        values, row = (param.main_grad if grads else param.detach()), 0
        for part in param.spec.parts:
            found.append((part, values[row : row + part.shape[0]]))
            row += part.shape[0]
    return found


def assemble(ranks: list[list[tuple[Any, Tensor]]]) -> dict[str, Tensor]:
    """Logical tensors from the boxes of all ranks; the boxes must cover each tensor."""
    out: dict[str, Tensor] = {}
    for part, values in (box for rank in ranks for box in rank):
        full = out.setdefault(part.name, torch.full(part.global_shape, torch.nan, dtype=values.dtype))
        at = tuple(slice(start, start + size) for start, size in zip(part.start, part.shape, strict=True))
        full[at] = values
    assert not any(full.isnan().any() for full in out.values()), "the boxes leave a hole"
    return out
