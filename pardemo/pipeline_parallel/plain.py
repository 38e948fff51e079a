"""GPipe and 1F1B with send and receive by hand: one rank's part of a pipeline step, in about a hundred lines.

The chapter *Pipeline parallelism* builds the same loops in its sections 1 and 3. Leads to
:class:`pardemo.pipeline_parallel.Pipeline`, which runs any :class:`~pardemo.pipeline_parallel.Schedule`, hands on
tensors of any shape or tuples of them, lets go of what has been sent, all-reduces the gradients of tied weights, and
checks that all ranks run the same schedule.

Rank i has stage i of the model. A batch goes through in m micro-batches; activations travel down, gradients up::

    rank 0 --activation k--> rank 1 --activation k--> rank 2     loss of micro-batch k
    rank 0 <--gradient  k--- rank 1 <--gradient  k--- rank 2

Four micro-batches on three ranks (F a forward, B a backward, drawn as if both took equally long)::

    GPipe     rank 0   F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3      every rank holds all four
              rank 1   .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 ..
              rank 2   .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. ..

    1F1B      rank 0   F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3      holds three
              rank 1   .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..      two
              rank 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..      one
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class PlainPipeline:
    """This rank's stage of a model, run by :meth:`gpipe` or :meth:`one_f_one_b`; gradients add up in ``.grad``.

    >>> mine = PlainPipeline(stage, F.mse_loss, micro_batches=8)   # doctest: +SKIP
    >>> loss = mine.one_f_one_b(inputs, targets)                   # doctest: +SKIP
    >>> optimizer.step()                                           # doctest: +SKIP

    Args:
        stage: this rank's layers. All stages keep the shape and dtype of the batch's inputs.
        loss_of: (output of the last stage, targets) of a micro-batch to its mean loss.
        micro_batches: into how many equal parts a batch is cut.
        group: the pipeline's ranks; the default group when None.

    All ranks of the job create theirs together, since gradients get connections of their own: a second group of the
    same ranks. So an activation on its way down never waits for a gradient on its way up. :meth:`close` ends this
    group.
    """

    def __init__(self, stage: nn.Module, loss_of: Loss, micro_batches: int, group: dist.ProcessGroup | None = None):
        self.stage, self.loss_of, self.micro_batches, self.group = stage, loss_of, micro_batches, group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.first, self.last = self.rank == 0, self.rank == self.ranks - 1
        self.back = dist.new_group(None if group is None else dist.get_process_group_ranks(group))
        self.most_held = 0  # micro-batches between their forward and their backward

    def gpipe(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        """All forwards, then all backwards: the mean loss on the last rank, None on the others.

        Args:
            inputs: of the whole batch, [batch, ...]; the first rank reads them, the others only their shape.
            targets: of the whole batch, [batch, ...]; the last rank reads them.
        """
        self._begin(inputs, targets)
        for k in range(self.micro_batches):
            self._forward(k)
        for k in range(self.micro_batches):
            self._backward(k)
        return self._end()

    def one_f_one_b(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        """Some forwards ahead, then a forward and a backward by turns, then the backwards that are left.

        Rank i is p − 1 − i forwards ahead: as many as it takes until micro-batch 0 comes back to it.
        """
        self._begin(inputs, targets)
        ahead = min(self.ranks - 1 - self.rank, self.micro_batches)
        for k in range(ahead):
            self._forward(k)
        for k in range(ahead, self.micro_batches):
            self._forward(k)
            self._backward(k - ahead)
        for k in range(self.micro_batches - ahead, self.micro_batches):
            self._backward(k)
        return self._end()

    def close(self) -> None:
        """Ends the gradients' connections; every rank calls it."""
        dist.destroy_process_group(self.back)

    def _begin(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.inputs, self.targets = inputs.chunk(self.micro_batches), targets.chunk(self.micro_batches)
        self.held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # micro-batch: what came in, what went out
        self.sent: list[tuple[dist.Work, torch.Tensor]] = []  # a tensor stays alive until it has left
        self.losses: list[torch.Tensor] = []
        self.most_held = 0

    def _forward(self, k: int) -> None:
        x = self.inputs[k]  # [batch/m, ...]
        if not self.first:
            x = torch.empty_like(x)
            dist.recv(x, group=self.group, group_src=self.rank - 1)
            x.requires_grad_()  # a leaf: backward ends here, and its gradient goes up
        y = self.stage(x)  # [batch/m, ...]
        if self.last:
            y = self.loss_of(y, self.targets[k]) / self.micro_batches  # its part of the batch's mean
            self.losses.append(y.detach())
        else:
            self._send(y.detach(), self.rank + 1, self.group)
        self.held[k] = x, y
        self.most_held = max(self.most_held, len(self.held))

    def _backward(self, k: int) -> None:
        x, y = self.held.pop(k)
        gradient = None  # of the loss: 1
        if not self.last:
            gradient = torch.empty_like(y)
            dist.recv(gradient, group=self.back, group_src=self.rank + 1)
        y.backward(gradient)  # adds to the weights' .grad
        if not self.first:
            self._send(x.grad, self.rank - 1, self.back)  # type: ignore[arg-type]

    def _send(self, tensor: torch.Tensor, to: int, group: dist.ProcessGroup | None) -> None:
        """Starts a message and does not wait: two ranks that waited for each other's receive would wait forever."""
        tensor = tensor.contiguous()
        self.sent.append((dist.isend(tensor, group=group, group_dst=to), tensor))  # type: ignore[arg-type]

    def _end(self) -> torch.Tensor | None:
        for message, _ in self.sent:
            message.wait()
        return torch.stack(self.losses).sum() if self.last else None
