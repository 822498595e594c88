"""The model's norms: replicated over tp, applied to the rows that this rank holds."""

from torch import Tensor, nn

from megalite.kernels.layernorm import layernorm, layernorm_beside, layernorm_residual
from megalite.kernels.rmsnorm import rmsnorm, rmsnorm_beside, rmsnorm_residual
from megalite.model.context import ModelContext
from megalite.parallel.spec import ParamSpec
from megalite.parallel.tp.rows import empty_param
from megalite.parallel.tp.specs import replicated_reduce, whole


class _Norm(nn.Module):
    def __init__(self, name: str, context: ModelContext):
        super().__init__()
        self.eps = context.model.norm_eps
        self.impl = context.kernels[context.model.norm]
        self._add("weight", name, context, init="ones")

    def _add(self, attribute: str, name: str, context: ModelContext, *, init: str) -> None:
        shape = (context.model.hidden_size,)
        param = empty_param(shape, context.dtype)
        part = whole(f"{name}.{attribute}", shape, tp=context.tp)
        param.spec = ParamSpec((part,), "norm", init=init, tp_reduce=replicated_reduce(context.tp))
        self.register_parameter(attribute, param)


class RmsNorm(_Norm):
    """RMSNorm over the hidden dim."""

    def forward(self, x: Tensor) -> Tensor:
        """(rows, D) -> (rows, D)."""
        return rmsnorm(x, self.weight, eps=self.eps, impl=self.impl)

    def beside(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of x, and x for the branch around it: their gradients are added in the norm's kernel."""
        return rmsnorm_beside(x, self.weight, eps=self.eps, impl=self.impl)

    def after_add(self, branch: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of branch + x, and the sum, in one kernel."""
        return rmsnorm_residual(branch, x, weight=self.weight, eps=self.eps, impl=self.impl)


class LayerNorm(_Norm):
    """LayerNorm over the hidden dim, with a bias."""

    def __init__(self, name: str, context: ModelContext):
        super().__init__(name, context)
        self._add("bias", name, context, init="zeros")

    def forward(self, x: Tensor) -> Tensor:
        """(rows, D) -> (rows, D)."""
        return layernorm(x, self.weight, self.bias, eps=self.eps, impl=self.impl)

    def beside(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of x, and x for the branch around it: their gradients are added in the norm's kernel."""
        return layernorm_beside(x, self.weight, self.bias, eps=self.eps, impl=self.impl)

    def after_add(self, branch: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of branch + x, and the sum, in one kernel."""
        return layernorm_residual(branch, x, weight=self.weight, bias=self.bias, eps=self.eps, impl=self.impl)


def make_norm(name: str, context: ModelContext) -> nn.Module:
    """The norm that the config asks for; `name` is its logical name, e.g. `layers.3.mlp_norm`."""
    return {"rmsnorm": RmsNorm, "layernorm": LayerNorm}[context.model.norm](name, context)
