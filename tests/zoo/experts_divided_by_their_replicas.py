"""Experts' gradients are divided by the number of their replicas only: too large by the expert-parallel degree.

An expert's gradient is a sum over the tokens of all ranks of its group before anything is summed, so that a mean over
the ranks that hold the same experts leaves it too large. Adam hides it: a factor changes nothing in its updates.
pytorch 160285 reports it of torchtitan's experts (doubled on two ranks), Megatron-LM 5956 of Megatron-FSDP.
"""

import torch
import torch.distributed as dist
from common import LanguageModel, arguments, neighbours, sum_gradients, train
from cut_layers import ExpertBlock


def reduce():
    for name, parameter in model.named_parameters():
        group = same_experts if ".experts." in name else dist.group.WORLD
        sum_gradients([parameter], group, dist.get_world_size(None if args.mended else group))


args = arguments(ep=1)
expert, same_experts = neighbours(args.ep)
torch.manual_seed(6)
model = LanguageModel(ExpertBlock(expert), ExpertBlock(expert))
train(args, model, reduce=reduce)
