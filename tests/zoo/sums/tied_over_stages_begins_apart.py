"""The first and the last stage share a table of embeddings, whose two copies begin with different numbers.

Their gradients are summed in each step, so that the difference stays. In PaddleNLP's pipelines the shared weights
were made equal when the stages were built, and then each stage drew its weights anew (7772, 7775). Here each
parameter is drawn from a seed made of its name, so that the start does not depend on the layout; but on the last
stage the table has another name.
"""

import zlib

import common
import torch
import torch.distributed as dist


@torch.no_grad()
def initialize(stage):
    """Draws each matrix of a stage from a seed of its own."""
    for name, parameter in stage.named_parameters():
        if parameter.dim() == 2:
            torch.manual_seed(zlib.crc32(name.encode()))
            parameter.normal_(std=parameter.shape[1] ** -0.5)
        elif "norm" not in name:
            parameter.zero_()


def main():
    args = common.arguments(pp=1)
    dist.init_process_group("gloo")
    pipeline, data = common.neighbours(args.pp)
    stage = common.Stage(dist.get_rank(pipeline), args.pp)
    initialize(stage)
    if args.mended:
        dist.broadcast(stage.tied[0].data, group_src=0, group=pipeline)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.01)
    for step in range(common.STEPS):
        optimizer.zero_grad()
        total = torch.zeros(())
        for inputs, targets in common.micro_batches(step, args, data):
            total += common.through_stage(stage, inputs, targets, 1 / args.accumulate)
        common.sum_gradients(stage.tied, pipeline)
        common.sum_gradients(stage.parameters(), data, divide_by=dist.get_world_size(data))
        optimizer.step()
        common.show(step, total, ranks=dist.get_world_size(data))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
