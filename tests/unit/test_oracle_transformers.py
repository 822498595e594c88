"""The oracle equals `transformers` in float64 on copied weights: logits, loss, every gradient, and torch's optimizers.

transformers upcasts to `torch.float32` by name in norms, softmax, rope and loss; here that name stands for float64
while its model is built and run, so that nothing rounds and the tolerance can be that of float64.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests import reference_gpt as oracle

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-10
"""Relative to the largest element: some 1e5 float64 roundings of 1e-16, and room."""
LLAMA3 = {
    "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 16,
}  # fmt: skip
SMALL = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 101, "max_seq_len": 64}
CASES = {
    "llama": SMALL | {"ffn_size": 88},
    "llama-gqa": SMALL | {"ffn_size": 88, "num_kv_heads": 2, "norm_eps": 1e-6},
    "llama-mqa-tied": SMALL | {"ffn_size": 40, "num_kv_heads": 1, "tie_embeddings": True},
    "llama-bias-wide-heads": SMALL | {"ffn_size": 40, "head_dim": 16, "bias": True},
    "llama-linear-rope": SMALL | {"ffn_size": 40, "rope_scaling": LLAMA3 | {"type": "linear"}},
    "llama-llama3-rope": SMALL | {"ffn_size": 40, "rope_theta": 500.0, "rope_scaling": LLAMA3, "num_kv_heads": 2},
    "gpt": SMALL | {"family": "gpt"},
    "gpt-deeper": SMALL | {"family": "gpt", "num_layers": 3, "num_heads": 2, "ffn_size": 48},
    "gpt-untied": SMALL | {"family": "gpt", "tie_embeddings": False},
}


@pytest.fixture
def float32_is_float64(monkeypatch):
    previous = torch.get_default_dtype()
    for name in ("float32", "float"):
        monkeypatch.setattr(torch, name, torch.float64)
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(previous)


def llama_model(model: SimpleNamespace) -> torch.nn.Module:
    rope = {"rope_type": "default", "rope_theta": model.rope_theta}
    if model.rope_scaling is not None:
        scaling = dict(model.rope_scaling)
        rope |= {"rope_type": scaling.pop("type"), "factor": scaling["factor"]}
        scaling["original_max_position_embeddings"] = scaling.pop("original_max_seq_len")
        rope |= scaling if rope["rope_type"] == "llama3" else {}
    config = transformers.LlamaConfig(
        num_hidden_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        intermediate_size=model.ffn_size,
        vocab_size=model.vocab_size,
        max_position_embeddings=model.max_seq_len,
        tie_word_embeddings=model.tie_embeddings,
        rms_norm_eps=model.norm_eps,
        attention_bias=model.bias,
        mlp_bias=model.bias,
        rope_parameters=rope,
        attn_implementation="eager",
    )
    return transformers.LlamaForCausalLM(config)


def gpt_model(model: SimpleNamespace) -> torch.nn.Module:
    config = transformers.GPT2Config(
        n_layer=model.num_layers,
        n_embd=model.hidden_size,
        n_head=model.num_heads,
        n_inner=model.ffn_size,
        vocab_size=model.vocab_size,
        n_positions=model.max_seq_len,
        tie_word_embeddings=model.tie_embeddings,
        layer_norm_epsilon=model.norm_eps,
        activation_function="gelu_new",
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        attn_implementation="eager",
    )
    return transformers.GPT2LMHeadModel(config)


LLAMA_NAMES = {
    "embedding.word": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head",
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    "attention.q": "self_attn.q_proj", "attention.k": "self_attn.k_proj", "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
}  # fmt: skip
GPT_NAMES = {
    "embedding.word": "transformer.wte", "embedding.position": "transformer.wpe", "final_norm": "transformer.ln_f",
    "head": "lm_head", "attention_norm": "ln_1", "mlp_norm": "ln_2",
    "attention.q": "attn.c_attn", "attention.k": "attn.c_attn", "attention.v": "attn.c_attn",
    "attention.out": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
}  # fmt: skip


def hf_view(name: str, hf: dict[str, Tensor], family: str) -> Tensor:
    """The part of transformers' tensors that holds the logical tensor `name`, in its orientation."""
    module, leaf = name.rsplit(".", 1)
    names = LLAMA_NAMES if family == "llama" else GPT_NAMES
    if module.startswith("layers."):
        _, i, module = module.split(".", 2)
        block = "model.layers" if family == "llama" else "transformer.h"
        value = hf[f"{block}.{i}.{names[module]}.{leaf}"]
        if family == "gpt" and value.dim() == 2:
            value = value.T  # Conv1D holds (in, out)
    else:
        value = hf[f"{names[module]}.{leaf}"]
    if family == "gpt" and module.removeprefix("attention.") in "qkv":
        return value.chunk(3)["qkv".index(module[-1])]
    return value


def assert_close(actual: Tensor, expected: Tensor, what: str, *, floor: float = 0.0) -> None:
    error = (actual - expected).abs().max() / expected.abs().max().clamp(min=floor)
    assert error < TOLERANCE, f"{what}: relative error {error:.2e}"


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients(case: str, float32_is_float64):
    model = oracle.resolve(**CASES[case])
    params = oracle.random_params(model, seed=3)
    hf = (llama_model if model.family == "llama" else gpt_model)(model)
    if model.norm == "rmsnorm":
        assert hf.model.rotary_emb.inv_freq.dtype == torch.float64
    with torch.no_grad():
        for name, value in params.items():
            hf_view(name, dict(hf.named_parameters()), model.family).copy_(value)
    tokens = torch.randint(model.vocab_size, (3, 49), generator=torch.Generator().manual_seed(4))
    inputs, labels = tokens[:, :-1], tokens[:, 1:].clone()
    labels[0, 5:9] = labels[2, 30:] = oracle.IGNORE

    scores = hf(inputs).logits
    hf_loss = hf(inputs, labels=inputs, shift_labels=labels).loss
    hf_loss.backward()
    assert_close(oracle.logits(params, model, inputs), scores, "logits")
    loss, grads = oracle.gradients(params, model, {"tokens": inputs, "labels": labels})
    assert loss == pytest.approx(hf_loss.item(), rel=TOLERANCE)
    hf_grads = {name: param.grad for name, param in hf.named_parameters()}
    assert sum(g.numel() for g in grads.values()) == sum(g.numel() for g in hf_grads.values())
    # without rope softmax ignores the bias of k: its gradient is zero and holds only roundings
    floor = 1e-3 * max(grad.abs().max().item() for grad in grads.values())
    for name, grad in grads.items():
        assert_close(grad, hf_view(name, hf_grads, model.family), name, floor=floor)


def test_documents_are_independent_sequences():
    model = oracle.resolve(**CASES["llama-gqa"])
    params = oracle.random_params(model, seed=5)
    tokens = torch.randint(model.vocab_size, (1, 12), generator=torch.Generator().manual_seed(6))
    documents = torch.tensor([[0] * 5 + [1] * 7])
    together = oracle.logits(params, model, tokens, documents)
    apart = [oracle.logits(params, model, piece) for piece in (tokens[:, :5], tokens[:, 5:])]
    assert_close(together, torch.cat(apart, dim=1), "logits")  # rope is relative, so positions need not restart
    assert (together - oracle.logits(params, model, tokens))[:, 5:].abs().max() > 1e-3


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("clip_norm", [0.0, 0.05])
def test_steps_equal_torch_optimizers(name: str, clip_norm: float):
    model = oracle.resolve(**CASES["gpt"])
    params = oracle.random_params(model, seed=7)
    generator = torch.Generator().manual_seed(8)
    tokens = [torch.randint(model.vocab_size, (2, 17), generator=generator) for _ in range(3)]
    batches = [{"tokens": t[:, :-1], "labels": t[:, 1:]} for t in tokens]
    lrs = [1e-2, 2e-2, 5e-3]
    decay = 0.1 if name == "adamw" else 0.0  # torch's SGD couples weight decay
    settings = {"name": name, "clip_norm": clip_norm, "momentum": 0.5, "weight_decay": decay, "betas": (0.9, 0.97)}
    steps = oracle.train_steps(params, model, batches, optimizer=settings, lrs=lrs)

    leaves = {key: value.clone().requires_grad_() for key, value in params.items()}
    groups = [
        {"params": [p for key, p in leaves.items() if oracle.kind(key) in kinds], "weight_decay": wd}
        for kinds, wd in ((("linear", "embedding"), decay), (("norm", "bias"), 0.0))
    ]
    if name == "adamw":
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.97), eps=1e-8)
    else:
        optimizer = torch.optim.SGD(groups, momentum=0.5)
    for step, batch, lr in zip(steps, batches, lrs, strict=True):
        optimizer.zero_grad()
        oracle.forward(leaves, model, batch["tokens"], batch["labels"]).mean().backward()
        total = torch.nn.utils.clip_grad_norm_(leaves.values(), clip_norm if clip_norm > 0 else torch.inf)
        assert step.grad_norm == pytest.approx(total.item(), rel=TOLERANCE)
        assert total > 0.05
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        for key, value in leaves.items():
            assert_close(step.params[key], value.detach(), f"{name} {key}")
