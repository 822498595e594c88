"""Recompute modes: what a block keeps, equal bits, and parameters whose storage is away before backward."""

import pytest
import torch

from megalite.mesh import single_device_mesh
from tests.unit.model_tools import GPT, LLAMA, make_batch, make_config, make_stages, params_of, run, set_main_grads

MODES = ("none", "selective", "full")
DROPOUT = {"dropout": 0.2, "attention_dropout": 0.3}


def forward_kept_bytes(config) -> int:
    """Bytes that a block's forward keeps for its backward, each storage once; none of them is a parameter's."""
    (stage,) = make_stages(config, single_device_mesh())
    batch = make_batch(config)
    block = stage.links[1]
    x = stage.links[0](None, batch).detach().requires_grad_()
    storages = {x.data_ptr(): x.nbytes}
    held = []

    def pack(tensor):
        held.append(tensor)  # so that no address is used twice
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    full = config.recompute == "full" and block.recomputable
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.set_grad_enabled(not full):
        block(x, batch)
    owned = {param.untyped_storage().data_ptr() for param in block.parameters()}
    assert not owned & storages.keys(), "autograd keeps a parameter's data"
    return sum(storages.values())


@pytest.mark.parametrize("model", [LLAMA, GPT, LLAMA | {"attention_dropout": 0.1}], ids=["llama", "gpt", "dropout"])
def test_kept_bytes_drop_from_mode_to_mode(model):
    none, selective, full = (forward_kept_bytes(make_config(model, dtype="fp32", recompute=mode)) for mode in MODES)
    rows, width, ffn = 32, 32, 48
    assert none - selective >= rows * ffn * 4, "the MLP's activation is still kept"
    assert full == rows * width * 4
    assert none > selective > full
    if model.get("attention_dropout"):
        assert none - selective >= 2 * 4 * 16 * 16 * 4, "the attention weights are still kept"


def gradients(model, mode, *, documents):
    config = make_config(model, dtype="fp32", recompute=mode)
    stages = make_stages(config, single_device_mesh())
    set_main_grads(stages, torch.float32)
    losses = run(stages, make_batch(config, documents=documents), full_recompute=mode == "full")
    return [losses, *(param.main_grad for param in params_of(stages))]


@pytest.mark.parametrize("model", [LLAMA, LLAMA | DROPOUT, GPT | DROPOUT], ids=["llama", "llama_drop", "gpt_drop"])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recompute_changes_no_bit(model, mode):
    plain = gradients(model, "none", documents=mode == "full")
    again = gradients(model, mode, documents=mode == "full")
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert all(a.any() for a in plain)


class FreedUnit:
    """A link's parameters as views of one flat buffer that is empty unless the link runs, as ZeRO stage 3 does it."""

    def __init__(self, link):
        params = list(link.parameters())
        self.values = torch.cat([param.detach().reshape(-1) for param in params])
        self.full = self.values.clone()
        self.num_fills = 0
        offset = 0
        for param in params:
            param.data = self.full[offset : offset + param.numel()].view(param.shape)
            offset += param.numel()
        self.free()
        link.forward = self._around(link.forward)

    def free(self):
        self.full.untyped_storage().resize_(0)

    def fill(self):
        self.full.untyped_storage().resize_(self.values.nbytes)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(self.full):
            self.full.copy_(self.values)
        self.num_fills += 1

    def _around(self, forward):
        def wrapped(x, batch):
            self.fill()
            y = forward(x, batch)
            self.free()
            if y.requires_grad:
                y.register_hook(lambda _: self.fill())  # before this link's backward
            return y

        return wrapped


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", [LLAMA | DROPOUT, GPT], ids=["llama", "gpt_untied"])
def test_storages_may_be_freed_between_forward_and_backward(model, mode):
    model = model | {"tie_embeddings": False}
    plain = gradients(model, mode, documents=False)
    config = make_config(model, dtype="fp32", recompute=mode)
    stages = make_stages(config, single_device_mesh())
    set_main_grads(stages, torch.float32)
    units = [FreedUnit(link) for stage in stages for link in stage.links]
    losses = run(stages, make_batch(config), full_recompute=mode == "full")
    assert all(unit.num_fills >= 2 for unit in units)
    found = [losses, *(param.main_grad for param in params_of(stages))]
    assert all(tensor.any() for tensor in plain)
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
