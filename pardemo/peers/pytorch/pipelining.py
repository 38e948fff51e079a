"""torch.distributed.pipelining on the same stages and micro-batches, with a timeline of what it computes."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.microbatch import TensorChunkSpec

from pardemo.meters import Timeline
from pardemo.world.rank import device

#: the names of our orders -> theirs
SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "one_f_one_b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb_h1": ScheduleInterleavedZeroBubble,
    "zb_v": ScheduleZBVZeroBubble,
    "dual_pipe_v": ScheduleDualPipeV,
}
#: Those whose stages lie in a V.
V_SHAPES = ("zb_v", "dual_pipe_v")


class TorchPipeline:
    """torch's pipeline with :class:`pardemo.pipeline_parallel.Pipeline`'s ``step``. Gradients are left in ``.grad``.

    Args:
        chunks: this rank's stages: of the model's stages, number rank, rank + p, …; in a V rank and 2p − 1 − rank.
        schedule: of :data:`SCHEDULES`. "zb_h1" with several chunks is torch's interleaved zero bubble.
        micro_batches: into how many parts the batch is cut.
        loss_of: (output, targets) of a micro-batch to its mean loss.
        group: the pipeline's ranks; the default group when None.
        timeline: notes spans of kind "forward", "backward" and "weight gradients", as ours does.
        scale_grads: whether it divides ``.grad`` by the micro-batches at the end of a step, as torch does by itself.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        schedule: str,
        micro_batches: int,
        loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        group: dist.ProcessGroup | None = None,
        timeline: Timeline | None = None,
        scale_grads: bool = True,
    ):
        if schedule not in SCHEDULES:
            raise ValueError(f"no schedule {schedule!r}; there are {', '.join(SCHEDULES)}")
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        total = len(chunks) * ranks
        is_v = schedule in V_SHAPES
        numbers = [rank, total - 1 - rank] if is_v else range(rank, total, ranks)
        stages = [_Stage(chunk, s, total, group, timeline) for s, chunk in zip(numbers, chunks, strict=True)]
        self._first, self._last = rank == 0, rank == (0 if is_v else ranks - 1)
        several = schedule in ("interleaved", "zb_h1", *V_SHAPES)
        cut = {} if several else {"args_chunk_spec": (TensorChunkSpec(0),)}
        self._schedule = SCHEDULES[schedule](
            stages if several else stages[0], micro_batches, loss_of, scale_grads=scale_grads, **cut
        )

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        """Forward and backward of a batch; its mean loss on the last stage's rank, None elsewhere."""
        losses: list[torch.Tensor] = []
        self._schedule.step(
            *((inputs,) if self._first else ()),
            target=targets if self._last else None,
            losses=losses,
            return_outputs=False,
        )
        return torch.stack([loss.detach() for loss in losses]).mean() if self._last else None


class _Stage(PipelineStage):
    """Theirs, with each computation noted."""

    def __init__(self, chunk, index, total, group, timeline):
        super().__init__(chunk, index, total, device(), group=group)
        self._timeline = timeline

    def forward_one_chunk(self, fwd_chunk_id: int, *args, **kwargs):
        with self._span("forward", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args, **kwargs):
        with self._span("backward", bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args, **kwargs):
        with self._span("weight gradients", bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def _span(self, kind: str, micro_batch: int):
        return self._timeline.span(kind, f"{self.stage_index}.{micro_batch}") if self._timeline else nullcontext()
