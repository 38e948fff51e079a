"""Pipeline parallelism: every rank has some of the layers, and a batch goes through them in micro-batches.

To read first: :mod:`pardemo.pipeline_parallel.plain`, GPipe and 1F1B by hand.

Sources: Huang et al. 2019, "GPipe" (arXiv 1811.06965); Narayanan et al. 2019, "PipeDream" (SOSP '19); Narayanan et al.
2021, "Efficient Large-Scale Language Model Training on GPU Clusters" (arXiv 2104.04473, 2.2); Qi et al. 2023, "Zero
Bubble Pipeline Parallelism" (arXiv 2401.10241).

From the bottom up:

- :mod:`~pardemo.pipeline_parallel.instructions`: forward, backward (whole or in two parts), send, receive of a stage
  and a micro-batch.
- :func:`gpipe`, :func:`one_f_one_b`, :func:`interleaved`, :func:`zb_h1`, :func:`zb_v`: orders, as generators;
  :class:`Schedule`: an order for so many ranks and micro-batches.
- :func:`chart`, :func:`prove`, :func:`instructions`: when it happens in an ideal world, that nothing is missing and
  nothing stands still, and what each rank is told. No process is needed.
- :func:`cut_by_layers`: a list of layers into stages.
- :class:`Pipeline`: runs any schedule on real ranks. :class:`DeferredBatchNorm`: running statistics of the whole batch.

Each rank has the gradients of its own stages: clip by ``pardemo.zero.gradient_norm.clip_grad_norm_(chunks, max_norm,
pipeline_group=group, tied=tied)``, and scale with torch's ``ShardedGradScaler(device, process_group=group)``, which
skips a step on all ranks or none.
"""

from pardemo.pipeline_parallel.batch_norm import DeferredBatchNorm
from pardemo.pipeline_parallel.executor import Pipeline
from pardemo.pipeline_parallel.instructions import Backward, BackwardInput, BackwardWeight, Forward
from pardemo.pipeline_parallel.schedules import (
    Schedule,
    ScheduleError,
    gpipe,
    interleaved,
    one_f_one_b,
    placed,
    v_shape,
)
from pardemo.pipeline_parallel.stages import cut_by_layers
from pardemo.pipeline_parallel.timetable import Chart, chart, instructions, measured_chart, most_held, prove
from pardemo.pipeline_parallel.zero_bubble import zb_h1, zb_v

__all__ = [
    "Backward",
    "BackwardInput",
    "BackwardWeight",
    "Chart",
    "DeferredBatchNorm",
    "Forward",
    "Pipeline",
    "Schedule",
    "ScheduleError",
    "chart",
    "cut_by_layers",
    "gpipe",
    "instructions",
    "interleaved",
    "measured_chart",
    "most_held",
    "one_f_one_b",
    "placed",
    "prove",
    "v_shape",
    "zb_h1",
    "zb_v",
]
