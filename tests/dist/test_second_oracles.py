"""The oracle against PyTorch's own parallelism: FSDP2 and DTensor tensor parallel give the same loss and gradients.

One nn.Module, written for torch's recipes and not for megalite's, takes the oracle's parameters by logical name.
Sharded by `fully_shard`, by tensor and sequence parallel plans, or by both, its loss and gradients in float64 equal
those of `tests/reference_gpt.py` on the whole batch.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests import reference_gpt as oracle
from tests.dist.pool import run_ranks

FIELDS = {
    "num_layers": 3, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 48, "vocab_size": 64,
    "max_seq_len": 16,
}  # fmt: skip
TOLERANCE = 1e-10


class Attention(nn.Module):
    def __init__(self, model: SimpleNamespace):
        super().__init__()
        self.model = model
        H, N, K = model.head_dim, model.num_heads, model.num_kv_heads
        self.q, self.k, self.v = (nn.Linear(model.hidden_size, n * H, bias=False) for n in (N, K, K))
        self.out = nn.Linear(N * H, model.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, S, _ = x.shape
        q, k, v = (part(x).view(B, S, -1, self.model.head_dim) for part in (self.q, self.k, self.v))
        q, k = oracle.rotate(q, self.model), oracle.rotate(k, self.model)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).reshape(B, S, -1))


class Mlp(nn.Module):
    def __init__(self, model: SimpleNamespace):
        super().__init__()
        self.gate = nn.Linear(model.hidden_size, model.ffn_size, bias=False)
        self.up = nn.Linear(model.hidden_size, model.ffn_size, bias=False)
        self.down = nn.Linear(model.ffn_size, model.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, model: SimpleNamespace):
        super().__init__()
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(model.hidden_size, eps=model.norm_eps) for _ in range(2))
        self.attention, self.mlp = Attention(model), Mlp(model)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Gpt(nn.Module):
    def __init__(self, model: SimpleNamespace):
        super().__init__()
        self.embedding = nn.ModuleDict({"word": nn.Embedding(model.vocab_size, model.hidden_size)})
        self.layers = nn.ModuleList([Block(model) for _ in range(model.num_layers)])
        self.final_norm = nn.RMSNorm(model.hidden_size, eps=model.norm_eps)
        self.head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding["word"](tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.final_norm(x))


def make_batch(model: SimpleNamespace) -> dict[str, Tensor]:
    stream = torch.randint(model.vocab_size, (4, 17), generator=torch.Generator().manual_seed(5))
    labels = stream[:, 1:].clone()
    labels[1, 3:] = labels[3, 12:] = oracle.IGNORE
    return {"tokens": stream[:, :-1].contiguous(), "labels": labels}


def apply_tp(net: Gpt, mesh) -> None:
    """Tensor parallel with sequence parallel norms: activations between blocks are sharded over S."""
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    block = {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel(), "attention": whole, "mlp": whole}
    block |= {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    block |= {f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")}
    block |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.out", "mlp.down")}
    ends = {
        "embedding.word": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "final_norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(net, mesh, ends)
    for layer in net.layers:
        parallelize_module(layer, mesh, block)


def torch_run(rank: int, world: int, dp: int, tp: int) -> tuple[float, dict[str, Tensor]]:
    """The loss over the whole batch, and full gradients by logical name."""
    model = oracle.resolve(**FIELDS)
    torch.set_default_dtype(torch.float64)
    net = Gpt(model)
    net.load_state_dict(oracle.random_params(model, seed=3))
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    if tp > 1:
        apply_tp(net, mesh["tp"])
    if dp > 1:
        for module in (*net.layers, net):
            fully_shard(module, mesh=mesh["dp"])
    batch = make_batch(model)
    size = len(batch["tokens"]) // dp
    rows = slice(mesh.get_local_rank("dp") * size, (mesh.get_local_rank("dp") + 1) * size)
    scores = net(batch["tokens"][rows]).flatten(0, 1)
    loss = F.cross_entropy(scores, batch["labels"][rows].flatten(), ignore_index=oracle.IGNORE, reduction="sum")
    loss = loss / (batch["labels"] != oracle.IGNORE).sum()
    (loss * dp).backward()  # fully_shard averages over dp
    total = loss.detach().clone()
    torch.distributed.all_reduce(total, group=mesh.get_group("dp"))
    grads = {name: param.grad for name, param in net.named_parameters()}
    return total.item(), {k: g.full_tensor() if isinstance(g, DTensor) else g for k, g in grads.items()}


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])
def test_torch_parallelism_equals_the_oracle(dp: int, tp: int):
    model = oracle.resolve(**FIELDS)
    loss, grads = oracle.gradients(oracle.random_params(model, seed=3), model, make_batch(model))
    for torch_loss, torch_grads in run_ranks(dp * tp, torch_run, dp, tp):
        assert torch_loss == pytest.approx(loss, rel=TOLERANCE)
        assert set(torch_grads) == set(grads)
        for name, grad in grads.items():
            error = (torch_grads[name] - grad).abs().max() / grad.abs().max()
            assert error < TOLERANCE, f"{name}: relative error {error:.2e}"
