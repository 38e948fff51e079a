"""The first and the last stage of a pipeline share a table of embeddings, and neither gets the other's gradient.

The first stage has the gradient of the embedding, the last that of the head; the table's own is their sum. Without it
the two are different tables after one step. Cornstarch's pipelines began so (cornstarch-org/Cornstarch 16), and
Piper's (uw-syfi/piper 13); in Megatron-LM the sum was taken of parts that did not belong together (844).
"""

import common
import torch
import torch.distributed as dist


def main():
    args = common.arguments(pp=1)
    dist.init_process_group("gloo")
    pipeline, data = common.neighbours(args.pp)
    torch.manual_seed(7)
    stage = common.Stage(dist.get_rank(pipeline), args.pp)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.01)
    for step in range(common.STEPS):
        optimizer.zero_grad()
        total = torch.zeros(())
        for inputs, targets in common.micro_batches(step, args, data):
            total += common.through_stage(stage, inputs, targets, 1 / args.accumulate)
        if args.mended:
            common.sum_gradients(stage.tied, pipeline)
        common.sum_gradients(stage.parameters(), data, divide_by=dist.get_world_size(data))
        optimizer.step()
        common.show(step, total, ranks=dist.get_world_size(data))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
