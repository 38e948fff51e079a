"""One way to solve each exercise of this chapter."""

import hashlib

import torch
import torch.distributed as dist


def my_config():
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "num_processes": 2,
        "mixed_precision": "bf16",
        "fsdp_config": {
            "fsdp_version": 2,
            # Without a policy the whole model would be one unit, gathered all at once.
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "Block",
        },
    }


def my_in_step(model):
    digest = hashlib.sha256()
    for parameter in model.parameters():
        values = parameter.detach().cpu().contiguous()
        digest.update(values.view(torch.uint8).numpy().tobytes())  # as bytes: NumPy has no bf16
    digests = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    return len(set(digests)) == 1  # everybody sees all of them, so everybody answers alike
