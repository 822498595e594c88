"""Executes a lowered schedule on one rank: no decisions, only the listed actions in the listed order.

Invariant: messages are posted exactly where the list says, so both ends agree on their order; a compute action waits
for its own input and for nothing else. Sent buffers are kept until their send is done.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from megalite.batch import Microbatch
from megalite.comm.p2p import Message, irecv, isend
from megalite.mesh import Mesh
from megalite.observe.spans import Kind
from megalite.parallel.pp.actions import Action, Op
from megalite.parallel.pp.chunk import Chunk, Reduce
from megalite.parallel.pp.lower import Lowered

MAX_SENDS = 8
"""Messages that a rank may keep until they are taken. Any number is safe, see the invariant of lower.py; far from the
receiver a rank is held up only where it could run ahead of it by as many computations."""
_NOTHING = nullcontext()


class StageActions(Protocol):
    """What GATHER and RESHARD do to a stage."""

    def gather(self, *, backward: bool) -> None: ...
    def reshard(self) -> None: ...


@dataclass(frozen=True)
class Wire:
    """The tensor that travels between stages for a microbatch."""

    shape: Callable[[Microbatch], tuple[int, ...]]
    dtype: torch.dtype


@dataclass
class Pass:
    """One run of the schedule: its microbatches, what is on the way and what was computed."""

    batches: list[Microbatch]
    loss_grad: float
    train: bool
    inputs: dict[Action, Message | Tensor] = field(default_factory=dict)
    """F or B action -> its input, received or on the way; B stands for the I of a split backward too."""
    sends: list[tuple[Action, Message]] = field(default_factory=list)
    outputs: dict[Action, Tensor] = field(default_factory=dict)
    """F or B action -> its output, until it is sent or used by the neighbour stage on this rank."""
    losses: dict[int, Tensor] = field(default_factory=dict)


class PipelineRuntime:
    """Runs this rank's row of `lowered` over its chunks.

    Args:
        lowered:  the schedule; checked before.
        chunks:   stage -> Chunk, for the stages of this rank.
        actions:  stage -> what GATHER and RESHARD mean.
        wire:     shape and dtype of messages.
    """

    def __init__(
        self,
        lowered: Lowered,
        chunks: dict[int, Chunk],
        actions: dict[int, StageActions],
        *,
        mesh: Mesh,
        wire: Wire,
    ):
        self.lowered = lowered
        self.row = lowered.actions[mesh.pp.rank]
        self.chunks = chunks
        self.actions = actions
        self.mesh = mesh
        self.wire = wire
        self.reduces = _completing_backwards(self.row)
        self.gathers_for_backward = _gathers_for_backward(self.row)
        self._num_begun = 0

    def begin(self) -> None:
        """Start the gathers that the row begins with: they are on their way while a step is prepared; `run` goes on
        behind them."""
        while self._num_begun < len(self.row) and self.row[self._num_begun].op is Op.GATHER:
            self._listed(self._num_begun, Pass([], 0.0, train=True))
            self._num_begun += 1

    def run(self, batches: list[Microbatch], *, loss_grad: float = 0.0, train: bool = True) -> list[Tensor]:
        """Move all microbatches through; returns the loss sum of each on the last stage's rank, else [].

        Args:
            loss_grad: gradient of each token's loss: 1 / tokens of the global batch.

        Communication: one message of the wire's shape per microbatch and stage boundary between ranks, each way.
        """
        state = Pass(batches, loss_grad, train)
        start, self._num_begun = self._num_begun, 0
        for index in range(start, len(self.row)):
            self._listed(index, state)
        for action, message in state.sends:
            with self._span(action, "message"):
                message.wait()
        return [state.losses[mb] for mb in sorted(state.losses)]

    def _listed(self, index: int, state: Pass) -> None:
        action = self.row[index]
        with self._span(action, "action"):
            self._execute(index, action, state)

    def _span(self, action: Action, kind: Kind) -> AbstractContextManager[None]:
        """Records the body of a `with` while a step is traced."""
        spans = self.mesh.ledger.spans
        return _NOTHING if spans is None else spans.span(f"wait {action}" if kind == "message" else str(action), kind)

    def _execute(self, index: int, action: Action, state: Pass) -> None:
        if action.op is Op.F:
            self._forward(action, state)
        elif action.op in (Op.B, Op.I):
            self._backward(action, state)
        elif action.op is Op.W:
            self.chunks[action.stage].backward_weights(
                action.mb, reduce=self.reduces.get((action.stage, action.mb), "no")
            )
        elif action.op in (Op.SEND_F, Op.SEND_B):
            self._send(action, state)
        elif action.op in (Op.RECV_F, Op.RECV_B):
            self._receive(action, state)
        elif action.op is Op.GATHER:
            self.actions[action.stage].gather(backward=index in self.gathers_for_backward)
        elif action.op is Op.RESHARD:
            self.actions[action.stage].reshard()
        else:
            assert action.op is Op.REDUCE, action  # started link by link inside the backward before it

    def _forward(self, action: Action, state: Pass) -> None:
        stage, mb = action.stage, action.mb
        x = self._take(state.inputs, action)
        y = self.chunks[stage].forward(mb, x, state.batches[mb], train=state.train)
        if stage == self.lowered.schedule.num_stages - 1:
            state.losses[mb] = y.sum(dtype=torch.promote_types(y.dtype, torch.float32))
            if state.train:
                state.inputs[Action(Op.B, stage, mb)] = torch.full_like(y, state.loss_grad)
        else:
            self._hand_over(action, Action(Op.F, stage + 1, mb), y, state)

    def _backward(self, action: Action, state: Pass) -> None:
        stage, mb, chunk = action.stage, action.mb, self.chunks[action.stage]
        output_grad = self._take(state.inputs, Action(Op.B, stage, mb))
        if action.op is Op.B:
            grad = chunk.backward(mb, output_grad, reduce=self.reduces.get((stage, mb), "no"))
        else:
            grad = chunk.backward_input(mb, output_grad)
        if stage > 0:
            self._hand_over(Action(Op.B, stage, mb), Action(Op.B, stage - 1, mb), grad, state)

    def _hand_over(self, producer: Action, consumer: Action, tensor: Tensor, state: Pass) -> None:
        """Give a result to the neighbour stage on this rank, or keep it for its SEND."""
        if self._rank_of(consumer.stage) == self.mesh.pp.rank:
            state.inputs[consumer] = tensor
        else:
            state.outputs[producer] = tensor

    def _send(self, action: Action, state: Pass) -> None:
        forward = action.op is Op.SEND_F
        tensor = state.outputs.pop(Action(Op.F if forward else Op.B, action.stage, action.mb))
        to = self._rank_of(action.stage + (1 if forward else -1))
        tag = self._tag(action.stage, action.mb)
        self._let_go(state)
        message = isend(tensor.contiguous(), self._channel(forward), to=to, tag=tag, site=action.op.value)
        state.sends.append((action, message))

    def _let_go(self, state: Pass) -> None:
        """Drop what has been sent. gloo does not tell of its sends whether they are done, so at most MAX_SENDS wait."""
        state.sends = [(a, m) for a, m in state.sends if m.handle is not None and not m.handle.is_completed()]
        while len(state.sends) >= MAX_SENDS:
            action, oldest = state.sends.pop(0)
            with self._span(action, "message"):
                oldest.wait()

    def _receive(self, action: Action, state: Pass) -> None:
        forward = action.op is Op.RECV_F
        sender = action.stage + (-1 if forward else 1)
        buffer = torch.empty(self.wire.shape(state.batches[action.mb]), dtype=self.wire.dtype, device=self.mesh.device)
        consumer = Action(Op.F if forward else Op.B, action.stage, action.mb)
        tag = self._tag(sender, action.mb)
        state.inputs[consumer] = irecv(buffer, self._channel(forward), source=self._rank_of(sender), tag=tag)

    def _take(self, inputs: dict[Action, Message | Tensor], action: Action) -> Tensor | None:
        """The input of a compute action; None for the first stage, which reads its tokens."""
        found = inputs.pop(action, None)
        if not isinstance(found, Message):
            return found
        with self._span(Action(Op.RECV_F if action.op is Op.F else Op.RECV_B, action.stage, action.mb), "message"):
            return found.wait()

    def _channel(self, forward: bool):
        return self.mesh.pp if forward else self.mesh.pp_backward

    def _rank_of(self, stage: int) -> int:
        return self.lowered.schedule.stage_rank[stage]

    def _tag(self, sender_stage: int, mb: int) -> int:
        """Unique per message and direction: the sending stage and the microbatch."""
        return mb * self.lowered.schedule.num_stages + sender_stage


def _completing_backwards(row: tuple[Action, ...]) -> dict[tuple[int, int], Reduce]:
    """(stage, mb) of each backward that a REDUCE follows: its links may be reduced as soon as they are done."""
    completing: dict[tuple[int, int], Reduce] = {}
    backward: dict[int, int] = {}
    ends: dict[int, tuple[int, int]] = {}
    for action in row:
        if action.op in (Op.B, Op.W):
            backward[action.stage] = action.mb
        elif action.op is Op.REDUCE:
            ends[action.stage] = (action.stage, backward[action.stage] if action.mb is None else action.mb)
            completing[ends[action.stage]] = "part"
    return completing | dict.fromkeys(ends.values(), "last")


def _gathers_for_backward(row: tuple[Action, ...]) -> set[int]:
    """Indices of the GATHERs whose stage runs a backward next."""
    found = set()
    upcoming: dict[int, Op] = {}
    for index in reversed(range(len(row))):
        action = row[index]
        if action.op in (Op.F, Op.B, Op.I):
            upcoming[action.stage] = action.op
        elif action.op is Op.GATHER and upcoming.get(action.stage) in (Op.B, Op.I):
            found.add(index)
    return found
