"""Runs a schedule on real ranks: computes what it says, sends and receives what follows from it.

1F1B on two ranks, four micro-batches, as the executor sees it (F: forward, B: backward; > sends what the other needs
next; a receive is posted where it stands, and waited for when its micro-batch is computed)::

    rank 0   F0> F1>    B0 F2>    B1 F3>    B2    B3
    rank 1       F0 B0>    F1 B1>    F2 B2>    F3 B3>

    between them: [b/m, s, h], a micro-batch's activation one way, its gradient the other
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pardemo import compat
from pardemo.collectives import ring_all_reduce, ring_broadcast
from pardemo.collectives.agreement import compare_lines
from pardemo.groups import Tied, group_of
from pardemo.meters.timeline import Timeline
from pardemo.pipeline_parallel.exchange import (
    BACK,
    DTYPES,
    FORTH,
    MAX_DIMENSIONS,
    Incoming,
    StageExchange,
    TensorSpec,
    abandon,
)
from pardemo.pipeline_parallel.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
)
from pardemo.pipeline_parallel.schedules import Schedule
from pardemo.pipeline_parallel.split import SplitBackward
from pardemo.pipeline_parallel.timetable import instructions
from pardemo.world.rank import device

Tensors = torch.Tensor | tuple[torch.Tensor, ...]
Loss = Callable[[Tensors, Tensors], torch.Tensor]


class Pipeline:
    """This rank's stages of a model, run by a schedule. Gradients are those of the mean over the whole batch.

    >>> schedule = Schedule(one_f_one_b, ranks=2, micro_batches=8)                         # doctest: +SKIP
    >>> mine = cut_by_layers(layers, schedule.stages)[rank :: schedule.ranks]               # doctest: +SKIP
    >>> loss = Pipeline(mine, schedule, F.cross_entropy).step(inputs, targets)              # doctest: +SKIP

    A stage returns one tensor or a tuple of tensors, which the next stage takes as its arguments (a skip connection is
    one more of them); numbers without a gradient, such as masks, travel too. All micro-batches of a step look alike:
    that is told once, before the first. An activation that has been sent is let go of: autograd keeps only what it
    computes with. Behind frozen stages no gradients travel. Under ``torch.autocast`` activations travel in the
    precision in which they are handed on. A chunk with a ``no_sync`` (``BucketedDataParallel``) exchanges its gradients
    in its last backward of a step.

    Args:
        chunks: this rank's stages in their order: of the model's stages, the ``schedule.stages_of(rank)``.
        schedule: for as many ranks as the group has; the same on all of them.
        loss_of: (output of the last stage, targets) of a micro-batch to its **mean** loss, one number. The batch's mean
            is taken to be the mean of these: where they are means over different counts (labels that are ignored),
            divide the micro-batch's sum by the batch's count over m instead.
        group: the pipeline's ranks; the default group when None.
        checkpointing: keep only each stage's inputs, and run its forward again before its backward (1811.06965, 2.3).
        tied: parameters of this rank of which other ranks have a copy: copies start alike, as the group's first rank
            has them, and their gradients are summed at the end of every step, as in Megatron-core's
            ``finalize_model_grads``.
        timeline: notes spans of kind "forward", "backward", "weight gradients" (of a backward in two parts), "wait",
            named "stage.micro-batch", and "communication".

    Made by all ranks of the group together.

    Raises:
        ValueError: another number of ranks or chunks than the schedule has, ranks with different schedules, copies of a
            tied weight that differ in shape, dtype or in whether they are trained; engines that would clip by the norm
            of one of a rank's stages (``max_norm``); backwards in two parts with ``checkpointing``, which would run the
            forward twice, or with an engine, which would take the first part for all; ``find_unused_parameters``.
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
        self.group = group_of(group)
        rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        if (schedule.ranks, schedule.chunks) != (ranks, len(chunks)):
            raise ValueError(
                f"the schedule is for {schedule.ranks} ranks with {schedule.chunks} stages each, not for {ranks} ranks "
                f"with {len(chunks)}"
            )
        if len(chunks) > 1 and any(getattr(chunk, "max_norm", None) is not None for chunk in chunks):
            raise ValueError("engines with max_norm clip by the norm of their own stage: use one stage a rank")
        if schedule.is_split and (checkpointing or any(hasattr(chunk, "no_sync") for chunk in chunks)):
            raise ValueError(
                "backwards in two parts go with neither checkpointing nor an engine that exchanges gradients in "
                "backward: take an order with whole ones"
            )
        if any(getattr(chunk, "find_unused_parameters", False) for chunk in chunks):
            raise ValueError(
                "find_unused_parameters looks through the graph of one micro-batch, and a stage has several: freeze "
                "what takes no part"
            )
        name = f"{getattr(schedule.order, '__name__', 'an order')} of {schedule.micro_batches} micro-batches"
        steps = (str(step) for of_rank in range(ranks) for step in schedule.computes(of_rank))
        compare_lines("the ranks' schedules differ", [name, *steps], self.group)
        for parameter, holders in tied:
            trained = "trained" if parameter.requires_grad else "frozen"
            mine = f"{parameter.dtype} {tuple(parameter.shape)}, {trained}"
            compare_lines("the copies of a tied weight differ", [mine], holders)
            ring_broadcast(parameter, holders)
        self.schedule, self.loss_of, self.checkpointing = schedule, loss_of, checkpointing
        self.tied, self.timeline, self._failed = tuple(tied), timeline, False
        self._stages = dict(zip(schedule.stages_of(rank), chunks, strict=True))
        self._last = schedule.stages - 1
        self._program = instructions(schedule)[rank]
        self._last_backward = {step.stage: step for step in self._program if isinstance(step, Backward)}
        self._do: dict[type, Callable[[Any], None]] = {
            Forward: self._forward,
            Backward: self._backward,
            BackwardInput: self._backward,
            BackwardWeight: self._backward_weight,
            SendActivation: self._send_activation,
            ReceiveActivation: self._receive_activation,
            SendGradient: self._send_gradient,
            ReceiveGradient: self._receive_gradient,
        }

    def step(self, inputs: Tensors | None = None, targets: Tensors | None = None) -> torch.Tensor | None:
        """Forward and backward of a whole batch; its mean loss on the last stage's rank, None elsewhere.

        Args:
            inputs: [batch, …], one tensor or the tuple of those that the first stage takes; read on its rank.
            targets: [batch, …], one or a tuple, read on the last stage's rank. The other ranks may leave them out.
                Gradients add up in ``.grad`` until the caller clears them.

        Raises:
            ValueError: a batch that does not divide into the micro-batches, no inputs or targets where they are read,
                micro-batches whose activations look different.
            TypeError: a stage hands on something else than tensors.
            ConnectionError: another rank's step failed, or it is gone.
            RuntimeError: a stage cuts the graph (``detach``, ``no_grad``, integers alone) behind something that is
                trained, which would train on nothing without a word; gradients are switched off. Or a step failed
                before: what it sent may still be on its way, or what it received be missing.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("Pipeline.step computes gradients, which no_grad switches off: call evaluate instead")
        # sums over the copies already; cloned, for a data-parallel wrapper uses the memory of its buckets again
        earlier = [None if p.grad is None else p.grad.clone() for p, _ in self.tied]
        for parameter, _ in self.tied:
            parameter.grad = None
        loss = self._run(inputs, targets, self._program)
        for number, ((parameter, holders), before) in enumerate(zip(self.tied, earlier, strict=True)):
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                with self.timeline.span("communication", f"tied {number}") if self.timeline else nullcontext():
                    ring_all_reduce(parameter.grad, holders)
                if before is not None:
                    parameter.grad += before
        return loss

    @torch.no_grad()
    def evaluate(self, inputs: Tensors | None = None, targets: Tensors | None = None) -> torch.Tensor | None:
        """The loss alone, as :meth:`step` gives it, on all ranks: only the forwards run, without gradients.

        Dropout and batch norm stay as they are: ``eval()`` is for the caller to call. Arguments and errors as
        :meth:`step`.
        """
        kinds = Forward | SendActivation | ReceiveActivation
        return self._run(inputs, targets, [step for step in self._program if isinstance(step, kinds)])

    def _run(
        self, inputs: Tensors | None, targets: Tensors | None, program: Sequence[Instruction]
    ) -> torch.Tensor | None:
        if self._failed:
            raise RuntimeError("an earlier step of this Pipeline failed on its way: make another one")
        self._failed = True  # until it has come to its end
        try:
            first, last, m = 0 in self._stages, self._last in self._stages, self.schedule.micro_batches
            parameters = (p for chunk in self._stages.values() for p in chunk.parameters())
            # before what fails on one rank alone: the others see its links close, and do not wait to make them
            self._exchange = StageExchange(self.group, next((p.device for p in parameters), device()))
            self._inputs = _micro_batches("inputs", inputs, m) if first else []
            self._targets = _micro_batches("targets", targets, m) if last else []
            self._held: dict[tuple[type, int, int], Any] = {}  # what one instruction leaves for a later one
            self._incoming: dict[int, tuple[TensorSpec, ...]] = {}  # a stage's inputs from another rank
            self._outgoing: dict[int, tuple[TensorSpec, ...]] = {}  # and its outputs to another one
            self._losses: list[torch.Tensor] = []
            for instruction in program:
                self._do[type(instruction)](instruction)
            self._exchange.flush()
            self._failed = False
            return torch.stack(self._losses).sum() if last else None
        finally:
            if self._failed:
                abandon(self.group)

    def _forward(self, step: Compute) -> None:
        stage, k = step.stage, step.micro_batch
        arrived = self._inputs[k] if stage == 0 else self._take(ReceiveActivation, step)
        xs = arrived if isinstance(arrived, tuple) else (arrived,)

        def run(*xs: torch.Tensor) -> Tensors:
            y = self._stages[stage](*xs)
            if stage < self._last:
                return y
            return self.loss_of(y, self._targets[k]).reshape(()) / self.schedule.micro_batches

        with self._span("forward", step), self._without_sync(stage, last=False):
            if self.checkpointing and torch.is_grad_enabled():
                versions = [compat.version(x) for x in xs]
                ys = _outputs(stage, checkpoint(run, *xs, use_reentrant=False))
                if versions != [compat.version(x) for x in xs]:
                    raise RuntimeError(
                        f"stage {stage} changes its input in place: checkpointing would run it again on what is left"
                    )
            else:
                ys = _outputs(stage, run(*map(_changeable, xs)))
        if torch.is_grad_enabled():
            inside = (*xs, *self._stages[stage].parameters())
            if not any(y.requires_grad for y in ys) and any(t.requires_grad for t in inside):
                raise RuntimeError(
                    f"stage {stage} hands on no gradient, though it or a stage before is trained: a detach, no_grad or "
                    "integers cut it off; freeze (requires_grad_(False)) what is not to be trained"
                )
            # the edges alone: once sent, an activation itself may go (autograd keeps what it computes with)
            self._held[Backward, stage, k] = xs, [get_gradient_edge(y) for y in ys if y.requires_grad]
        if stage == self._last:
            self._losses.append(ys[0].detach())
        else:
            handed = tuple(y.detach().requires_grad_(y.requires_grad) for y in ys)
            self._hand_on(SendActivation, ReceiveActivation, step, stage + 1, handed)

    def _backward(self, step: Compute) -> None:
        stage, k = step.stage, step.micro_batch
        xs, edges = self._held.pop((Backward, stage, k))
        gradients: Sequence[Any] = [None] * len(edges)
        if stage < self._last:
            gradients = self._take(ReceiveGradient, step)
        last, chunk = step == self._last_backward.get(stage), self._stages[stage]
        if last and isinstance(chunk, DistributedDataParallel):
            chunk.reducer.prepare_for_backward([])  # as torch's pipelining does: forwards said no_sync
            chunk.require_forward_param_sync = True
        with self._span("backward", step), self._without_sync(stage, last):
            if isinstance(step, BackwardInput):
                self._held[BackwardWeight, stage, k] = SplitBackward(edges, gradients, xs if stage else ())
            elif edges:
                torch.autograd.backward(edges, gradients)
        if stage == 0:
            return
        for number, x in enumerate(xs):
            if x.requires_grad and x.grad is None:
                raise RuntimeError(
                    f"stage {stage} gives its input {number} no gradient, though stages before it are trained by it: "
                    "use it, or hand on its detach()"
                )
        self._hand_on(SendGradient, ReceiveGradient, step, stage - 1, [x.grad for x in xs if x.requires_grad])

    def _backward_weight(self, step: Compute) -> None:
        with self._span("weight gradients", step):
            self._held.pop((BackwardWeight, step.stage, step.micro_batch)).weights()

    def _hand_on(self, send: type, receive: type, step: Compute, to: int, tensors: Sequence[torch.Tensor]) -> None:
        """Leaves a result for the send that follows; or, where this rank has the other stage too, for that one."""
        if self.schedule.rank_of(to) == self.schedule.rank_of(step.stage):
            self._held[receive, to, step.micro_batch] = tensors
        else:
            self._held[send, step.stage, step.micro_batch] = tensors

    def _take(self, receive: type, step: Compute) -> Sequence[torch.Tensor]:
        """What this computation needs from another stage; waits for it where it is still on its way."""
        parts = self._held.pop((receive, step.stage, step.micro_batch))
        if not any(isinstance(part, Incoming) for part in parts):
            return parts
        with self._span("wait", step):
            tensors = tuple(part.wait() for part in parts)
        if receive is ReceiveActivation:
            for tensor, spec in zip(tensors, self._incoming[step.stage], strict=True):
                tensor.requires_grad_(spec.has_gradient)
        return tensors

    def _send_activation(self, send: Instruction) -> None:
        tensors = self._held.pop((SendActivation, send.stage, send.micro_batch))
        way, specs = self._way(send.stage), tuple(map(TensorSpec.of, tensors))
        if send.stage not in self._outgoing:
            self._exchange.send_specs(specs, way)
        first = self._outgoing.setdefault(send.stage, specs)
        if first != specs:
            raise ValueError(
                f"stage {send.stage} hands on {first}, and of micro-batch {send.micro_batch} {specs}: all "
                "micro-batches of a step have to look alike"
            )
        for tensor in tensors:
            self._exchange.send(tensor, way)

    def _receive_activation(self, receive: Instruction) -> None:
        way = self._way(receive.stage - 1)
        if receive.stage not in self._incoming:
            self._incoming[receive.stage] = self._exchange.receive_specs(way)
        self._expect(receive, self._incoming[receive.stage], way)

    def _send_gradient(self, send: Instruction) -> None:
        for tensor in self._held.pop((SendGradient, send.stage, send.micro_batch)):
            self._exchange.send(tensor, -self._way(send.stage - 1))

    def _receive_gradient(self, receive: Instruction) -> None:
        specs = [spec for spec in self._outgoing[receive.stage] if spec.has_gradient]
        self._expect(receive, specs, -self._way(receive.stage))

    def _expect(self, receive: Instruction, specs: Sequence[TensorSpec], way: int) -> None:
        coming = tuple(self._exchange.receive(spec.shape, spec.dtype, way) for spec in specs)
        self._held[type(receive), receive.stage, receive.micro_batch] = coming

    def _way(self, stage: int) -> int:
        """On which way a stage's output travels to the next one: up a V it is the ranks' way back."""
        follows = (self.schedule.rank_of(stage) + 1) % self.schedule.ranks
        return FORTH if self.schedule.rank_of(stage + 1) == follows else BACK

    def _without_sync(self, stage: int, last: bool) -> AbstractContextManager:
        """Data-parallel replicas exchange once per step: not before a stage's last backward."""
        no_sync: Any = getattr(self._stages[stage], "no_sync", nullcontext)
        return nullcontext() if last else no_sync()

    def _span(self, kind: str, step: Compute) -> AbstractContextManager:
        return self.timeline.span(kind, f"{step.stage}.{step.micro_batch}") if self.timeline else nullcontext()


class _Changeable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def _changeable(x: torch.Tensor) -> torch.Tensor:
    """A stage's input in the same memory, which the stage may change in place (``ReLU(inplace=True)``) as it might
    change what another layer computed; autograd forbids it for a leaf."""
    return _Changeable.apply(x) if x.is_leaf and x.requires_grad and torch.is_grad_enabled() else x


def _outputs(stage: int, output: object) -> tuple[torch.Tensor, ...]:
    """A stage's output as a tuple of tensors; TypeError where it is something else that could not travel."""
    outputs: tuple[Any, ...] = output if isinstance(output, tuple) else (output,)
    for tensor in outputs or (None,):
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in DTYPES or tensor.dim() > MAX_DIMENSIONS:
            described = (
                f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            )
            raise TypeError(
                f"stage {stage} hands on {described}: return a tensor, or a tuple of tensors, of real numbers or truth "
                f"values in at most {MAX_DIMENSIONS} dimensions"
            )
    return outputs


def _micro_batches(name: str, batch: Tensors | None, many: int) -> list[Tensors]:
    """The batch in equal parts; ValueError where there is none, or it does not divide."""
    if isinstance(batch, tuple):
        return list(zip(*(_micro_batches(name, tensor, many) for tensor in batch), strict=True))
    if not isinstance(batch, torch.Tensor):
        raise ValueError(
            f"the rank that reads the {name} needs a tensor or a tuple of them, not {type(batch).__name__}"
        )
    if len(batch) % many or not len(batch):
        raise ValueError(f"a batch of {len(batch)} does not divide into {many} micro-batches of equal size")
    # .data: a counter of changes of its own, so that a stage that changes one in place does not spoil the others
    return [part if part.requires_grad else part.data for part in batch.chunk(many)]
