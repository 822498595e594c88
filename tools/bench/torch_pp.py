"""torch.distributed.pipelining for stages of bench/torch_model.py."""

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble
from torch.distributed.pipelining.schedules import _PipelineSchedule

from bench.rows import Row
from bench.torch_model import loss_of

SCHEDULES = {"1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B, "zbv": ScheduleZBVZeroBubble}


def make_schedule(
    row: Row, indices: list[int], modules: list[nn.Module], *, group: ProcessGroup, num_microbatches: int
) -> _PipelineSchedule:
    """torch's schedule over this rank's stages."""
    stages = [
        PipelineStage(module, index, row.pp * row.virtual, torch.device("cpu"), group=group)
        for index, module in zip(indices, modules, strict=True)
    ]
    return SCHEDULES[row.schedule](stages[0] if row.virtual == 1 else stages, num_microbatches, loss_fn=loss_of)
