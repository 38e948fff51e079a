"""DeepSpeed's engine without the model: its stages 1 to 3 at work on all parameters, while nothing is computed.

What an engine does by itself goes by elements: it flattens, fills buckets, cuts partitions and sub-groups wherever a
layer begins. So it is run with all layers, which takes little time where the layers do nothing but bring gradients.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from pardemo import compat, extras

with extras.needed_by(__name__):
    from transformers.modeling_outputs import CausalLMOutput

from pardemo.planner.job import RankJob
from pardemo.planner.records import Recorder

STAGES = (1, 2, 3)
Hooks = dict[str, Callable[[nn.Parameter], None]]


@contextlib.contextmanager
def cuts(job: RankJob, module: nn.Module, recorder: Recorder) -> Iterator[Hooks]:
    """Within the block the recorder is told when a DeepSpeed engine is at work: its hooks by parameter."""
    hooks: Hooks = {}
    if job.stage not in STAGES:
        yield hooks
        return
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    names: dict[int, str] = {}

    def registering(own: Callable) -> Callable:
        def register(parameter: nn.Parameter, hook: Callable) -> Any:
            if not names:
                names.update({id(p): name for name, p in module.named_parameters()})
            name = names[id(parameter)]

            def watched(*args: Any) -> None:
                with recorder.cut(name, parameter.grad):
                    hook(*args)

            hooks[name] = watched
            return own(parameter, watched)

        return register

    reduces = DeepSpeedEngine.allreduce_gradients

    def reducing(engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> None:
        with recorder.cut("", None):
            reduces(engine, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        for stage in (stage_1_and_2, stage3):
            register = registering(stage.register_grad_hook)
            stack.enter_context(compat.replaced(stage, "register_grad_hook", register))
        stack.enter_context(compat.replaced(DeepSpeedEngine, "allreduce_gradients", reducing))
        yield hooks


def empty(module: nn.Module, order: Sequence[str], hooks: Hooks, recorder: Recorder) -> None:
    """From now on the module's forward computes nothing; its backward brings gradients in ``order``."""
    named = dict(module.named_parameters())
    parameters = [(named[name], hooks[name]) for name in order]

    def forward(*args: Any, **kwargs: Any) -> CausalLMOutput:
        begin = torch.zeros((), requires_grad=True)
        return CausalLMOutput(loss=_Gradients.apply(begin, parameters, recorder))

    module.forward = forward


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parameters: Sequence, recorder: Recorder) -> torch.Tensor:
        ctx.parameters, ctx.recorder = parameters, recorder
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        for parameter, hook in ctx.parameters:
            shape, data = getattr(parameter, "ds_shape", parameter.shape), parameter.data
            parted = data.shape != shape  # a gradient has its parameter's shape, which stage 3 keeps elsewhere
            if parted:
                parameter.data = torch.empty(shape, dtype=data.dtype)
            if parameter.grad is None:
                parameter.grad = torch.empty(shape, dtype=data.dtype)
            hook(parameter)
            ctx.recorder.brought(parameter)
            if parted:
                parameter.data = data
        return grad, None, None
