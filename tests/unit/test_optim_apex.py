"""Selecting NVIDIA's Apex: found, missing, incomplete, and the other package of that name; with fakes on sys.path."""

import sys

import pytest
import torch

from megalite.kernels.adamw import Tensors, adamw_step, cases, reference
from megalite.optim.apex import ApexAdamW, apex_problem, choose_apex

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FUSED_ADAM = '''
import torch

class FusedAdam(torch.optim.Optimizer):
    """Apex's interface and state, with torch's arithmetic."""

    def __init__(self, params, lr, bias_correction, betas, eps, adam_w_mode, weight_decay):
        assert bias_correction and adam_w_mode
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    def step(self):
        for group in self.param_groups:
            group["step"] = group["step"] + 1 if "step" in group else 1
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                mean = state["exp_avg"] / (1 - beta1 ** group["step"])
                spread = (state["exp_avg_sq"] / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
                p.data.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * mean / spread)
'''


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An empty folder in front of sys.path; what is imported from it is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] in ("apex", "amp_C")]:
        del sys.modules[name]


def write(site, files: dict[str, str]) -> None:
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)


NVIDIA = {"apex/__init__.py": "", "apex/optimizers/__init__.py": FUSED_ADAM, "amp_C.py": ""}
OTHER = {
    "apex/__init__.py": "raise SystemExit('foreign code ran')",
    "apex-0.9.10.dev0.dist-info/METADATA": (
        "Metadata-Version: 2.1\nName: apex\nVersion: 0.9.10.dev0\nSummary: Toolkit for Pyramid, a Pylons Project\n"
    ),
}


def test_not_installed():
    assert "Apex is not installed" in apex_problem()
    with pytest.raises(ValueError, match=r"optimizer.implementation=apex can't be met: Apex is not installed.*auto"):
        choose_apex(CUDA, torch.float32)


def test_the_other_package_is_refused_without_running_it(site):
    write(site, OTHER)
    problem = apex_problem()
    assert "0.9.10.dev0 (Toolkit for Pyramid" in problem
    assert "not NVIDIA's" in problem
    assert "pip uninstall apex" in problem


def test_without_its_cuda_extensions(site):
    write(site, {name: text for name, text in NVIDIA.items() if name != "amp_C.py"})
    assert "without its CUDA extensions" in apex_problem()


def test_device_and_dtype(site):
    write(site, NVIDIA)
    assert apex_problem() == ""
    with pytest.raises(ValueError, match="needs a CUDA device, and the device is cpu"):
        choose_apex(CPU, torch.float32)
    with pytest.raises(ValueError, match="computes in fp32"):
        choose_apex(CUDA, torch.float64)
    assert choose_apex(CUDA, torch.float32).name == "apex"


def test_updates_equal_the_reference(site):
    """Several tensors and decays over steps: moments live in our tensors, the gradient stays, the copy is written."""
    write(site, NVIDIA)
    made = choose_apex(CUDA, torch.float32).module
    assert isinstance(made, ApexAdamW)
    ours, theirs = ([fresh(num) for num in (5, 12)] for _ in range(2))
    for number in (1, 2, 3):
        for i, decay in enumerate((0.1, 0.0)):
            hyper = cases.Hyper(1e-2, 0.9, 0.95, 1e-8, decay, number)
            adamw_step([ours[i]], hyper, scale=0.5, impl=made)
            adamw_step([theirs[i]], hyper, scale=0.5, impl=reference)
    for one, other in zip(ours, theirs, strict=True):
        for name in ("main", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-6, atol=1e-7)
        assert torch.equal(one.grad, other.grad)
        assert torch.equal(one.out_copy, one.main.bfloat16())


def fresh(num: int) -> Tensors:
    tensors = [tensor.detach() for tensor in cases.make_case(num, dtype=torch.float32).inputs()[0]]
    return Tensors(*tensors, torch.zeros(num, dtype=torch.bfloat16))
