"""Has what scripts of DeepSpeed have in common: its engine around a model, and a step under it or without it."""

import deepspeed
import torch
import torch.distributed as dist
from common import show, update

deepspeed.ops.__compatible_ops__ = {}  # or it compiles an operator that nothing here uses


def engine(model, optimizer, args, micro_batch, zero=None, mpu=None, **more):
    """DeepSpeed's engine, and its optimizer; ``zero`` and ``more`` go into its configuration."""
    settings = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": args.accumulate,
        "gradient_clipping": args.clip,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": args.stage, **(zero or {})},
        **more,
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings, mpu=mpu)[:2]


def take_step(step, model, optimizer, args, losses):
    """Takes the micro-batches' losses backward one by one, steps, and prints their mean over the ranks."""
    of_deepspeed, total = isinstance(model, deepspeed.DeepSpeedEngine), torch.zeros(())
    for loss in losses:
        total += loss.detach() / args.accumulate / dist.get_world_size()
        if of_deepspeed:
            model.backward(loss)
            model.step()
        else:
            (loss / args.accumulate).backward()
    if not of_deepspeed:
        update(model, optimizer, args.clip)
    dist.all_reduce(total)
    show(step, total)
