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
- :func:`instructions`, :func:`chart`, :func:`prove`: what each rank is told, when it happens in an ideal world, and
  that nothing is missing and nothing stands still. No process is needed.
- :func:`cut_by_layers`, :func:`cut_by_parameters`: a list of layers into stages.
- :class:`Pipeline`: runs any schedule on real ranks; stages hand on tensors or tuples of them, described by
  :mod:`~pardemo.pipeline_parallel.tensor_specs`. :class:`DeferredBatchNorm`: running statistics of the whole batch.

In a training script:

- Each rank has the gradients of its own stages. ``torch.nn.utils.clip_grad_norm_`` would clip by their norm alone; that
  of the whole model takes ``pardemo.zero.gradient_norm.clip_grad_norm_(chunks, max_norm, over=group, tied=tied)``.
- A ``GradScaler`` would skip a step on those ranks alone whose own gradients overflow. torch's
  ``ShardedGradScaler(device, process_group=group)`` asks all of them; ``loss_of`` scales the loss on the last stage's
  rank, and every rank calls ``scaler.scale(torch.ones(1))`` once, which makes the scaler.
- ``optimizer.step(closure)`` takes a closure that calls ``pipeline.step``; the loss is None but on the last stage's
  rank, so that no optimizer that reads it (L-BFGS) will do.
- Hooks by ``register_post_accumulate_grad_hook`` would run for each micro-batch, and are refused.
- A stage may change its input in place (``ReLU(inplace=True)``); with ``checkpointing`` that is refused.
"""

from pardemo.pipeline_parallel.batch_norm import DeferredBatchNorm
from pardemo.pipeline_parallel.executor import Pipeline
from pardemo.pipeline_parallel.instructions import Backward, BackwardInput, BackwardWeight, Forward
from pardemo.pipeline_parallel.proof import prove
from pardemo.pipeline_parallel.schedules import (
    Schedule,
    ScheduleError,
    gpipe,
    interleaved,
    one_f_one_b,
    placed,
    v_shape,
)
from pardemo.pipeline_parallel.stages import cut_by_layers, cut_by_parameters
from pardemo.pipeline_parallel.timetable import Chart, chart, instructions, measured_chart, most_held
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
    "cut_by_parameters",
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
