"""The feed-forward part of a block, split over tp along the ffn dim: SwiGLU (gate and up fused in one GEMM) or GELU."""

from torch import Tensor, nn

from megalite.kernels.gelu import BiasGelu, bias_gelu, gelu
from megalite.kernels.swiglu import swiglu
from megalite.model.attention import residual_bias
from megalite.model.context import ModelContext
from megalite.model.recompute import replay
from megalite.parallel.spec import ParamSpec
from megalite.parallel.tp.begun import Steps, in_turns
from megalite.parallel.tp.linear import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.tp.specs import split

ACTIVATIONS = {"swiglu": (swiglu, ("gate", "up")), "gelu": (gelu, ("up",))}
"""The op, and the logical tensors that its input's weight stacks."""


class Mlp(nn.Module):
    """up (and gate), activation, down."""

    def __init__(self, layer: int, context: ModelContext):
        super().__init__()
        name = f"layers.{layer}.mlp"
        self.activation, stacked = ACTIVATIONS[context.model.activation]
        self.pure = context.kernels[context.model.activation]
        self.again = context.recompute_ops(layer)
        wide = make_wide(name, stacked, context)
        self.wide_name = "_".join(stacked)
        self.add_module(self.wide_name, wide)
        self.down = make_down(name, context)

    def steps(self, x: Tensor) -> Steps:
        """(rows, D) -> (rows, D), rows being this rank's. What is to be recomputed takes no turns."""
        if "mlp" in self.again and x.requires_grad:
            return replay(lambda rows: in_turns([self._steps(rows)])[0], x)
        return (yield from self._steps(x))

    def _steps(self, x: Tensor) -> Steps:
        wide = getattr(self, self.wide_name)
        biased = self.activation is gelu and wide.bias is not None  # the bias is added inside the activation
        finish = wide.begin(x, add_bias=not biased)
        yield
        hidden = finish()
        if "activation" in self.again:
            finish = self.down.begin(hidden, BiasGelu(wide.bias, self.pure) if biased else self.pure)
        elif biased:
            finish = self.down.begin(bias_gelu(hidden, wide.bias, impl=self.pure))
        else:
            finish = self.down.begin(self.activation(hidden, impl=self.pure))
        yield
        return finish()


def make_wide(name: str, stacked: tuple[str, ...], context: ModelContext) -> ColumnParallelLinear:
    """The projection from D to F (2F for gate and up)."""
    model = context.model

    def parts(attribute: str, columns: tuple[int, ...]):
        shape = (model.ffn_size, *columns)
        return tuple(split(f"{name}.{which}.{attribute}", shape, dim=0, tp=context.tp) for which in stacked)

    weight = ParamSpec(parts("weight", (model.hidden_size,)), "linear", init_std=model.init_std)
    bias = ParamSpec(parts("bias", ()), "bias", init="zeros") if model.bias else None
    return ColumnParallelLinear(weight, bias, **context.linear(f"mlp.{'_'.join(stacked)}"))


def make_down(name: str, context: ModelContext) -> RowParallelLinear:
    """The projection from F back into the residual stream."""
    model = context.model
    part = split(f"{name}.down.weight", (model.hidden_size, model.ffn_size), dim=1, tp=context.tp)
    weight = ParamSpec((part,), "linear", init_std=context.residual_std)
    return RowParallelLinear(weight, residual_bias(f"{name}.down", context), **context.linear("mlp.down"))
