"""What a pipeline refuses, because it would wait for ever or train on nothing without a word."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from pardemo import compat
from pardemo.pipeline_parallel.schedules import Schedule


def compare_schedules(schedule: Schedule, group: dist.ProcessGroup) -> None:
    """All ranks run parts of one schedule, else they send what nobody awaits; ValueError where they differ."""
    name = getattr(schedule.order, "__name__", "an order")
    description = f"{name} of {schedule.micro_batches} micro-batches and {schedule.chunks} stages a rank"
    mine = description, [list(map(str, schedule.computes(rank))) for rank in range(schedule.ranks)]
    all_of_them: list = [None] * schedule.ranks
    dist.all_gather_object(all_of_them, mine, group=group)
    for rank, theirs in enumerate(all_of_them):
        if theirs != all_of_them[0]:
            raise ValueError(f"the ranks' schedules differ: rank 0 has {all_of_them[0][0]}, rank {rank} {theirs[0]}")


def refuse_parts_of_a_norm(chunks: Sequence[nn.Module]) -> None:
    """ValueError where several of a rank's stages have an engine that clips: each would know its own gradients."""
    if len(chunks) > 1 and any(getattr(chunk, "max_norm", None) is not None for chunk in chunks):
        raise ValueError(
            "an engine for each of a rank's stages would clip by the norm of its own stages: max_norm needs a schedule "
            "with one stage a rank"
        )


def refuse_a_split_backward(schedule: Schedule, chunks: Sequence[nn.Module], checkpointing: bool) -> None:
    """ValueError where a backward in two parts would cost more than it saves, or an engine would take one for all."""
    if not schedule.is_split:
        return
    name = getattr(schedule.order, "__name__", "this order")
    if checkpointing:
        raise ValueError(
            f"{name} has backwards in two parts, and checkpointing would run the forward again for each: take an order "
            "with whole ones"
        )
    if any(hasattr(chunk, "no_sync") for chunk in chunks):
        raise ValueError(
            f"{name} has backwards in two parts, and an engine that exchanges gradients would do so at the end of the "
            "first: take an order with whole ones, or average the gradients after the step"
        )


def refuse_hooks(stages: Mapping[int, nn.Module]) -> None:
    """RuntimeError where somebody waits for a parameter's gradient: it comes once per micro-batch, and each time a part
    of the batch's alone. (An engine in a stage has such hooks, and looks at those of others itself.)"""
    for number, stage in stages.items():
        if hasattr(stage, "no_sync"):
            continue
        for name, parameter in stage.named_parameters():
            hooks = compat.accumulate_hooks(parameter).values()
            if any(not (getattr(hook, "__module__", None) or "").startswith("pardemo.") for hook in hooks):
                raise RuntimeError(
                    f"{name} of stage {number} has a hook by register_post_accumulate_grad_hook, which would see a "
                    "micro-batch's part of the gradient: remove it, and do what it does after step()"
                )


def refuse_changed_inputs(stage: int, xs: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """RuntimeError where a stage has changed its inputs, and is to be run again on them."""
    if any(compat.version(x) != version for x, version in zip(xs, versions, strict=True)):
        raise RuntimeError(
            f"stage {stage} changes its input in place, and checkpointing would run it again on what is left: take "
            "inplace=False where the stage begins, or no checkpointing"
        )


def refuse_a_cut_graph(
    stage: int, chunk: nn.Module, xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor], is_last: bool
) -> None:
    """RuntimeError where no output has a gradient behind something that is trained: it would get none."""
    if any(y.requires_grad for y in ys):
        return
    trained = any(p.requires_grad for p in chunk.parameters())
    if trained or any(x.requires_grad for x in xs):
        what = "the loss has no gradient" if is_last else f"stage {stage} hands on no gradient"
        raise RuntimeError(
            f"{what}, though stage {stage} {'has parameters to train' if trained else 'is fed by trained ones'}: a "
            "detach, no_grad or integers cut it off; freeze (requires_grad_(False)) what is not to be trained"
        )


def gradients_of(stage: int, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What the stage before waits for: the gradient of each input that has one; RuntimeError where it has not."""
    for number, x in enumerate(xs):
        if x.requires_grad and x.grad is None:
            raise RuntimeError(
                f"stage {stage} gives its input {number} no gradient, though stages before it are trained by it: use "
                "it, or hand on its detach()"
            )
    return [x.grad for x in xs if x.requires_grad]
