"""torch's tensor and sequence parallelism (DTensor) for a stage of bench/torch_model.py."""

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from bench.torch_model import Stage

__all__ = ["local", "loss_parallel", "tensor_parallel"]


def tensor_parallel(module: Stage, mesh: DeviceMesh) -> None:
    """Shard a stage over tp, with activations sharded along the sequence between its linear layers."""
    rows = Shard(1)
    plan: dict = {}
    if module.embedding is not None:
        plan["embedding.word"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=rows)
    if module.head is not None:
        plan["final_norm"] = SequenceParallel()
        plan["head"] = ColwiseParallel(input_layouts=rows, output_layouts=Shard(-1), use_local_output=False)
    for number in module.layers:
        block = f"layers.{number}"
        for part in ("attention", "mlp"):
            plan[f"{block}.{part}_norm"] = SequenceParallel()
            plan[f"{block}.{part}"] = PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(Replicate(),))
        for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"):
            plan[f"{block}.{name}"] = ColwiseParallel()
        for name in ("attention.out", "mlp.down"):
            plan[f"{block}.{name}"] = RowwiseParallel(output_layouts=rows)
    parallelize_module(module, mesh, plan)


def local(loss: Tensor) -> Tensor:
    """The whole value as a plain tensor."""
    return loss.full_tensor() if isinstance(loss, DTensor) else loss
