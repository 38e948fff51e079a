"""Runs a schedule on real ranks: computes what it says, sends and receives what follows from it.

1F1B on two ranks, four micro-batches, as the executor sees it (F: forward, B: backward; > sends what the other needs
next; a receive is posted where it stands, and waited for when its micro-batch is computed)::

    rank 0   F0> F1>    B0 F2>    B1 F3>    B2    B3
    rank 1       F0 B0>    F1 B1>    F2 B2>    F3 B3>

    between them: [b/m, s, h], a micro-batch's activation one way, its gradient the other
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pardemo import compat
from pardemo.meters.timeline import Timeline
from pardemo.pipeline_parallel.checks import (
    compare_schedules,
    gradients_of,
    refuse_a_cut_graph,
    refuse_a_split_backward,
    refuse_changed_inputs,
    refuse_hooks,
    refuse_parts_of_a_norm,
)
from pardemo.pipeline_parallel.exchange import BACK, FORTH, Exchange, Incoming, abandon
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
from pardemo.pipeline_parallel.stages import Tensors, changeable, cut_batch
from pardemo.pipeline_parallel.tensor_specs import TensorSpec, outputs_of, words
from pardemo.pipeline_parallel.tied import Tied, TiedWeights
from pardemo.pipeline_parallel.timetable import instructions
from pardemo.world.rank import device

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

    Backwards in two parts (:class:`~.split.SplitBackward`) allow no ``checkpointing`` and no chunk with a ``no_sync``.

    Refused, since a stage before would train on nothing without a word: a stage that cuts the graph (``detach``,
    ``no_grad``, integers alone) behind something that is trained.

    Args:
        chunks: this rank's stages in their order: of the model's stages, the ``schedule.stages_of(rank)``.
        schedule: for as many ranks as the group has; the same on all of them.
        loss_of: (output of the last stage, targets) of a micro-batch to its **mean** loss, one number. The batch's mean
            is taken to be the mean of these: where they are means over different counts (labels that are ignored),
            divide the micro-batch's sum by the batch's count over m instead.
        group: the pipeline's ranks; the default group when None.
        checkpointing: keep only each stage's inputs, and run its forward again before its backward (1811.06965, 2.3).
        tied: pairs of a parameter of this rank of which other ranks have a copy, and the group of all that have one:
            copies start alike, and their gradients are summed at the end of every step, as in Megatron-core's
            ``finalize_model_grads``.
        timeline: notes spans of kind "forward", "backward", "weight gradients" (of a backward in two parts), "wait",
            named "stage.micro-batch", and "communication".

    Made by all ranks of the group together.

    Raises:
        ValueError: another number of ranks or chunks than the schedule has, ranks with different schedules, copies of a
            tied weight that differ in shape, dtype or in whether they are trained, ZeRO engines with ``max_norm`` for
            several stages of a rank; what a backward in two parts does not allow.
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
        refuse_parts_of_a_norm(chunks)
        refuse_a_split_backward(schedule, chunks, checkpointing)
        compare_schedules(schedule, self.group)
        self.schedule, self.loss_of, self.checkpointing = schedule, loss_of, checkpointing
        self.timeline = timeline
        self._failed = False
        self._stages = dict(zip(schedule.stages_of(rank), chunks, strict=True))
        self._last = schedule.stages - 1
        self._program = instructions(schedule)[rank]
        self._forwards = [one for one in self._program if isinstance(one, Forward | SendActivation | ReceiveActivation)]
        self._last_backward = {one.stage: one for one in self._program if isinstance(one, Backward)}
        self._do = {
            Forward: self._forward,
            Backward: self._backward,
            BackwardInput: self._backward,
            BackwardWeight: self._backward_weight,
            SendActivation: self._send_activation,
            ReceiveActivation: self._receive_activation,
            SendGradient: self._send_gradient,
            ReceiveGradient: self._receive_gradient,
        }
        self._tied = TiedWeights(tied, timeline)

    def step(self, inputs: Tensors | None = None, targets: Tensors | None = None) -> torch.Tensor | None:
        """Forward and backward of a whole batch; its mean loss on the last stage's rank, None elsewhere.

        Args:
            inputs: [batch, …], one tensor or the tuple of those that the first stage takes; read on its rank.
            targets: [batch, …], one or a tuple, read on the last stage's rank. The other ranks may leave them out.
                Gradients add up in ``.grad`` until the caller clears them.

        Raises:
            ValueError: a batch that does not divide into the micro-batches, no inputs or targets where they are read,
                micro-batches whose activations look different, or a loss that is not one number.
            TypeError: a stage hands on something else than tensors.
            ConnectionError: another rank's step failed, or it is gone.
            RuntimeError: a stage cuts the graph; gradients are switched off; another rank evaluates. Or a step failed
                before: what it sent may still be on its way, or what it received be missing.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("Pipeline.step computes gradients, which no_grad switches off: call evaluate instead")
        return self._guarded(self._train, inputs, targets)

    def evaluate(self, inputs: Tensors | None = None, targets: Tensors | None = None) -> torch.Tensor | None:
        """The loss alone, as :meth:`step` gives it: only the forwards run, without gradients.

        Dropout and batch norm stay as they are: ``eval()`` is for the caller to call. Arguments and errors as
        :meth:`step`.
        """
        with torch.no_grad():
            return self._guarded(self._run, inputs, targets, self._forwards)

    def __getstate__(self) -> dict:
        raise TypeError("a Pipeline holds connections to other ranks and cannot be copied: copy its chunks (deepcopy)")

    def _guarded(self, run: Callable, *args: object) -> torch.Tensor | None:
        if self._failed:
            raise RuntimeError("an earlier step of this Pipeline failed on its way: make another one")
        try:
            return run(*args)
        except BaseException:
            self._failed = True
            abandon(self.group)
            raise

    def _train(self, inputs: Tensors | None, targets: Tensors | None) -> torch.Tensor | None:
        self._tied.begin_step()
        loss = self._run(inputs, targets, self._program)
        self._tied.end_step()
        return loss

    def _run(
        self, inputs: Tensors | None, targets: Tensors | None, program: Sequence[Instruction]
    ) -> torch.Tensor | None:
        first, last, m = 0 in self._stages, self._last in self._stages, self.schedule.micro_batches
        parameters = (p for chunk in self._stages.values() for p in chunk.parameters())
        # before anything that fails on one rank alone: the others see its links close, and do not wait to make them
        self._exchange = Exchange(self.group, next((p.device for p in parameters), device()))
        refuse_hooks(self._stages)
        self._inputs = cut_batch("inputs", inputs, m) if first else ()
        self._targets = cut_batch("targets", targets, m) if last else ()
        self._held: dict[tuple[type, int, int], object] = {}  # what one instruction leaves for a later one
        self._incoming: dict[int, tuple[TensorSpec, ...]] = {}  # what a stage's inputs from another rank look like
        self._outgoing: dict[int, tuple[TensorSpec, ...]] = {}  # and its outputs to another one
        self._losses: list[torch.Tensor] = []
        for instruction in program:
            self._do[type(instruction)](instruction)
        self._exchange.flush()
        return torch.stack(self._losses).sum() if last else None

    def _forward(self, step: Compute) -> None:
        stage, k = step.stage, step.micro_batch
        arrived = self._inputs[k] if stage == 0 else self._take(ReceiveActivation, step)
        xs = arrived if isinstance(arrived, tuple) else (arrived,)
        with self._span("forward", step), self._without_sync(stage, last=False):
            ys = self._compute(stage, k, xs)
        if torch.is_grad_enabled():
            refuse_a_cut_graph(stage, self._stages[stage], xs, ys, is_last=stage == self._last)
            # the edges alone: once sent, an activation itself may go (autograd keeps what it computes with)
            self._held[Backward, stage, k] = xs, [get_gradient_edge(y) for y in ys if y.requires_grad]
        if stage == self._last:
            self._losses.append(ys[0].detach())
        else:
            handed = tuple(y.detach().requires_grad_(y.requires_grad) for y in ys)
            self._hand_on(SendActivation, ReceiveActivation, step, stage + 1, handed)

    def _compute(self, stage: int, k: int, xs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The stage's outputs; of the last stage, the micro-batch's part of the loss."""

        def run(*xs: torch.Tensor) -> Tensors:
            y = self._stages[stage](*map(changeable, xs))
            return self._part_of_loss(k, y) if stage == self._last else y

        if not self.checkpointing or not torch.is_grad_enabled():
            return outputs_of(stage, run(*xs))
        versions = [compat.version(x) for x in xs]
        ys = outputs_of(stage, checkpoint(run, *xs, use_reentrant=False))
        refuse_changed_inputs(stage, xs, versions)
        return ys

    def _part_of_loss(self, k: int, y: Tensors) -> torch.Tensor:
        loss = self.loss_of(y, self._targets[k])
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(f"loss_of gives one number, the micro-batch's mean, not {what}")
        return loss.reshape(()) / self.schedule.micro_batches

    def _backward(self, step: Compute) -> None:
        stage, k = step.stage, step.micro_batch
        xs, edges = self._held.pop((Backward, stage, k))
        gradients = [None] * len(edges) if stage == self._last else self._take(ReceiveGradient, step)
        last = step == self._last_backward.get(stage)
        if last and isinstance(self._stages[stage], DistributedDataParallel):
            self._stages[stage].reducer.prepare_for_backward([])  # as torch's pipelining does: forwards said no_sync
            self._stages[stage].require_forward_param_sync = True
        with self._span("backward", step), self._without_sync(stage, last):
            if isinstance(step, BackwardInput):
                self._held[BackwardWeight, stage, k] = SplitBackward(edges, gradients, xs if stage else ())
            elif edges:
                torch.autograd.backward(edges, gradients)
        if stage > 0:
            self._hand_on(SendGradient, ReceiveGradient, step, stage - 1, gradients_of(stage, xs))

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
        found = self._held.pop((receive, step.stage, step.micro_batch))
        if not any(isinstance(part, Incoming) for part in found):
            return found
        with self._span("wait", step):
            tensors = tuple(part.wait() for part in found)
        if receive is ReceiveActivation:
            for tensor, form in zip(tensors, self._incoming[step.stage], strict=True):
                tensor.requires_grad_(form.has_gradient)
        return tensors

    def _send_activation(self, send: Instruction) -> None:
        tensors = self._held.pop((SendActivation, send.stage, send.micro_batch))
        way = self._way(send.stage)
        forms = tuple(map(TensorSpec.of, tensors))
        if send.stage not in self._outgoing:
            self._exchange.send_forms(forms, not torch.is_grad_enabled(), way)
            self._outgoing[send.stage] = forms
        if self._outgoing[send.stage] != forms:
            raise ValueError(
                f"stage {send.stage} hands on {words(self._outgoing[send.stage])}, and of micro-batch "
                f"{send.micro_batch} {words(forms)}: all micro-batches of a step have to look alike"
            )
        for tensor in tensors:
            self._exchange.send(tensor, way)

    def _receive_activation(self, receive: Instruction) -> None:
        way = self._way(receive.stage - 1)
        if receive.stage not in self._incoming:
            self._incoming[receive.stage] = self._exchange.receive_forms(not torch.is_grad_enabled(), way)
        self._held[ReceiveActivation, receive.stage, receive.micro_batch] = self._expect(
            self._incoming[receive.stage], way
        )

    def _send_gradient(self, send: Instruction) -> None:
        for tensor in self._held.pop((SendGradient, send.stage, send.micro_batch)):
            self._exchange.send(tensor, -self._way(send.stage - 1))

    def _receive_gradient(self, receive: Instruction) -> None:
        forms = [form for form in self._outgoing[receive.stage] if form.has_gradient]
        self._held[ReceiveGradient, receive.stage, receive.micro_batch] = self._expect(forms, -self._way(receive.stage))

    def _way(self, stage: int) -> int:
        """On which way a stage's output travels to the next one: up a V it is the ranks' way back."""
        follows = (self.schedule.rank_of(stage) + 1) % self.schedule.ranks
        return FORTH if self.schedule.rank_of(stage + 1) == follows else BACK

    def _expect(self, forms: Sequence[TensorSpec], way: int) -> tuple[Incoming, ...]:
        return tuple(self._exchange.receive(torch.Size(form.shape), form.dtype, way) for form in forms)

    def _without_sync(self, stage: int, last: bool) -> AbstractContextManager:
        """Data-parallel copies exchange once per step: not before a stage's last backward."""
        chunk = self._stages[stage]
        return nullcontext() if last or not hasattr(chunk, "no_sync") else chunk.no_sync()

    def _span(self, kind: str, step: Compute) -> AbstractContextManager:
        return self.timeline.span(kind, f"{step.stage}.{step.micro_batch}") if self.timeline else nullcontext()
