"""Runs a schedule on real ranks: computes what it says, sends and receives what follows from it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from pardemo.collectives import ring_all_reduce
from pardemo.meters.timeline import Timeline
from pardemo.pipeline_parallel.exchange import BACK, FORTH, Exchange, Incoming, abandon
from pardemo.pipeline_parallel.instructions import (
    Backward,
    Compute,
    Forward,
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
)
from pardemo.pipeline_parallel.schedules import Schedule
from pardemo.pipeline_parallel.timetable import instructions
from pardemo.rank import device

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Form = tuple[torch.Size, torch.dtype]
Tied = tuple[nn.Parameter, dist.ProcessGroup]


class Pipeline:
    """This rank's stages of a model, run by a schedule. Gradients are those of the mean over the whole batch.

    >>> schedule = Schedule(one_f_one_b, ranks=2, micro_batches=8)                         # doctest: +SKIP
    >>> mine = cut_by_layers(layers, schedule.stages)[rank :: schedule.ranks]               # doctest: +SKIP
    >>> loss = Pipeline(mine, schedule, F.cross_entropy).step(inputs, targets)              # doctest: +SKIP

    A stage takes one tensor and returns one, and all micro-batches have one shape (it is told to the next stage once,
    before the first). An activation that has been sent is let go of: autograd keeps only what it computes with. A chunk
    with a ``no_sync`` (``BucketedDataParallel``) exchanges its gradients in its last backward of a step.

    Args:
        chunks: this rank's stages in their order: of the model's stages, number rank, rank + p, ….
        schedule: for as many ranks as the group has.
        loss_of: (output of the last stage, targets) of a micro-batch to its **mean** loss.
        group: the pipeline's ranks; the default group when None.
        checkpointing: keep only each stage's inputs, and run its forward again before its backward (1811.06965, §2.3).
        tied: pairs of a parameter of this rank of which other ranks have a copy, and the group of all that have one:
            copies start alike, and their gradients are summed at the end of every step, as in Megatron-core's
            ``finalize_model_grads``.
        timeline: notes spans of kind "forward", "backward", "wait", named "stage.micro-batch", and "communication".

    Raises:
        ValueError: another number of ranks or chunks than the schedule has.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        schedule: Schedule,
        loss_of: Loss,
        group: dist.ProcessGroup | None = None,
        *,
        checkpointing: bool = False,
        tied: Sequence[Tied] = (),
        timeline: Timeline | None = None,
    ):
        self.group = dist.group.WORLD if group is None else group
        rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        if schedule.ranks != ranks:
            raise ValueError(f"the schedule is for {schedule.ranks} ranks, the group has {ranks}")
        if len(chunks) != schedule.chunks:
            raise ValueError(f"the schedule has {schedule.chunks} stages on a rank, not {len(chunks)}")
        self.schedule, self.loss_of, self.checkpointing, self.tied = schedule, loss_of, checkpointing, tuple(tied)
        self.timeline = timeline
        self._failed = False
        self._stages = dict(zip(range(rank, schedule.stages, ranks), chunks, strict=True))
        self._program = instructions(schedule)[rank]
        self._last_backward = {one.stage: one for one in self._program if isinstance(one, Backward)}
        self._forms: dict[int, Form] = {}  # what a stage's inputs from another rank look like
        self._sent_forms: dict[int, Form] = {}  # and its outputs
        self._do = {
            Forward: self._forward,
            Backward: self._backward,
            SendActivation: self._send_activation,
            ReceiveActivation: self._receive_activation,
            SendGradient: self._send_gradient,
            ReceiveGradient: self._receive_gradient,
        }
        for parameter, holders in self.tied:
            dist.broadcast(parameter.data, dist.get_global_rank(holders, 0), group=holders)

    def step(self, inputs: torch.Tensor | None = None, targets: torch.Tensor | None = None) -> torch.Tensor | None:
        """Forward and backward of a whole batch; its mean loss on the last stage's rank, None elsewhere.

        Args:
            inputs: [batch, …], read on the first stage's rank. targets: [batch, …], read on the last's. The others may
                leave them out. Gradients add up in ``.grad`` until the caller clears them.

        Raises:
            ValueError: a batch that does not divide into the micro-batches, no inputs or targets where they are read,
                or activations of another shape than in the step before.
            TypeError: a stage hands on what has no gradient.
            ConnectionError: another rank's step failed, or it is gone.
            RuntimeError: a step failed before: what it sent may still be on its way, or what it received be missing.
        """
        if self._failed:
            raise RuntimeError("an earlier step of this Pipeline failed on its way: make another one")
        try:
            return self._step(inputs, targets)
        except BaseException:
            self._failed = True
            abandon(self.group)
            raise

    def _step(self, inputs: torch.Tensor | None, targets: torch.Tensor | None) -> torch.Tensor | None:
        first, last = 0 in self._stages, self.schedule.stages - 1 in self._stages
        self._inputs = self._micro_batches("inputs", inputs) if first else ()
        self._targets = self._micro_batches("targets", targets) if last else ()
        parameters = (p for chunk in self._stages.values() for p in chunk.parameters())
        self._exchange = Exchange(self.group, next((p.device for p in parameters), device()))
        self._held: dict[tuple[type, int, int], object] = {}  # what one instruction leaves for a later one
        self._losses: list[torch.Tensor] = []
        for instruction in self._program:
            self._do[type(instruction)](instruction)
        self._exchange.flush()
        for number, (parameter, holders) in enumerate(self.tied):
            self._sum_gradients(number, parameter, holders)
        return torch.stack(self._losses).sum() if last else None

    def _micro_batches(self, what: str, batch: torch.Tensor | None) -> Sequence[torch.Tensor]:
        m = self.schedule.micro_batches
        if batch is None:
            raise ValueError(
                f"the {'first' if what == 'inputs' else 'last'} stage's rank needs the {what} of the batch"
            )
        if len(batch) % m or not len(batch):
            raise ValueError(f"a batch of {len(batch)} does not divide into {m} micro-batches of equal size")
        return batch.chunk(m)

    def _forward(self, one: Compute) -> None:
        stage, k = one.stage, one.micro_batch
        x = self._inputs[k] if stage == 0 else self._take(ReceiveActivation, one).requires_grad_()
        with self._span("forward", one):
            y = self._compute(stage, k, x)
            if stage == self.schedule.stages - 1:
                y = y / self.schedule.micro_batches
                self._losses.append(y.detach())
                self._held[Backward, stage, k] = x, y
                return
        # the edge alone: once sent, the activation itself may go (autograd keeps what it computes with)
        self._held[Backward, stage, k] = x, get_gradient_edge(y) if y.requires_grad else None
        self._hand_on(SendActivation, ReceiveActivation, one, stage + 1, y.detach())

    def _compute(self, stage: int, k: int, x: torch.Tensor) -> torch.Tensor:
        """The stage's output; of the last stage, the loss."""
        run = self._stages[stage]
        if stage == self.schedule.stages - 1:
            run = partial(self._loss, k)
        return checkpoint(run, x, use_reentrant=False) if self.checkpointing else run(x)

    def _loss(self, k: int, x: torch.Tensor) -> torch.Tensor:
        return self.loss_of(self._stages[self.schedule.stages - 1](x), self._targets[k])

    def _backward(self, one: Compute) -> None:
        stage, k = one.stage, one.micro_batch
        x, root = self._held.pop((Backward, stage, k))
        gradient = None if stage == self.schedule.stages - 1 else self._take(ReceiveGradient, one)
        with self._span("backward", one), self._without_sync(one):
            if root is not None:
                torch.autograd.backward(root, gradient)
        if stage > 0:
            given = torch.zeros_like(x) if x.grad is None else x.grad
            self._hand_on(SendGradient, ReceiveGradient, one, stage - 1, given)

    def _hand_on(self, send: type, receive: type, one: Compute, to: int, tensor: torch.Tensor) -> None:
        """Leaves a result for the send that follows; or, where this rank has the other stage too, for that one."""
        if self.schedule.rank_of(to) == self.schedule.rank_of(one.stage):
            self._held[receive, to, one.micro_batch] = tensor
        else:
            self._held[send, one.stage, one.micro_batch] = tensor

    def _take(self, receive: type, one: Compute) -> torch.Tensor:
        """What this computation needs from another stage; waits for it where it is still on its way."""
        found = self._held.pop((receive, one.stage, one.micro_batch))
        if not isinstance(found, Incoming):
            return found
        with self._span("wait", one):
            return found.wait()

    def _send_activation(self, one: Instruction) -> None:
        tensor = self._held.pop((SendActivation, one.stage, one.micro_batch)).contiguous()
        form = tensor.shape, tensor.dtype
        if one.stage not in self._sent_forms:
            self._exchange.send_form(tensor)
            self._sent_forms[one.stage] = form
        if self._sent_forms[one.stage] != form:
            forms = self._sent_forms[one.stage], form
            told = " and then ".join(f"{dtype} {tuple(shape)}" for shape, dtype in forms)
            raise ValueError(
                f"stage {one.stage} gave activations of {told}: a Pipeline has micro-batches of one shape; make "
                "another Pipeline for another"
            )
        self._exchange.send(tensor, FORTH)

    def _receive_activation(self, one: Instruction) -> None:
        if one.stage not in self._forms:
            self._forms[one.stage] = self._exchange.receive_form()
        form = self._forms[one.stage]
        self._held[ReceiveActivation, one.stage, one.micro_batch] = self._exchange.receive(*form, FORTH)

    def _send_gradient(self, one: Instruction) -> None:
        tensor = self._held.pop((SendGradient, one.stage, one.micro_batch)).contiguous()
        self._exchange.send(tensor, BACK)

    def _receive_gradient(self, one: Instruction) -> None:
        form = self._sent_forms[one.stage]
        self._held[ReceiveGradient, one.stage, one.micro_batch] = self._exchange.receive(*form, BACK)

    def _without_sync(self, one: Compute) -> AbstractContextManager:
        """Data-parallel copies exchange once per step: not before a stage's last backward."""
        chunk = self._stages[one.stage]
        early = one != self._last_backward[one.stage] and hasattr(chunk, "no_sync")
        return chunk.no_sync() if early else nullcontext()

    def _sum_gradients(self, number: int, parameter: nn.Parameter, holders: dist.ProcessGroup) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        with self.timeline.span("communication", f"tied {number}") if self.timeline else nullcontext():
            ring_all_reduce(parameter.grad, holders)

    def _span(self, kind: str, one: Compute) -> AbstractContextManager:
        return self.timeline.span(kind, f"{one.stage}.{one.micro_batch}") if self.timeline else nullcontext()
