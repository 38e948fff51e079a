"""DeepSpeed's ZeRO 0 to 3, rightly, in fp32, with torch's optimizers."""

import common
import deepspeed
import torch
import torch.distributed as dist


def main():
    args = common.arguments()
    dist.init_process_group("gloo")
    deepspeed.ops.__compatible_ops__ = {}  # or it compiles an operator that nothing here uses
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model = common.model_of(args)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = common.optimizer_of(args, parameters)
    schedule = common.schedule_of(args, optimizer)
    stage = int(args.engine[-1])
    settings = {
        "train_micro_batch_size_per_gpu": args.samples // ranks // args.accumulate,
        "gradient_accumulation_steps": args.accumulate,
        "gradient_clipping": args.clip,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 4096, "contiguous_gradients": "view" in args.way,
                              "overlap_comm": "late" not in args.way, "stage3_param_persistence_threshold": 40},
    }  # fmt: skip
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=parameters, optimizer=optimizer, lr_scheduler=schedule, config=settings
    )
    torch.manual_seed(100 + rank)
    for step in range(common.STEPS):
        total = 0.0
        for inputs, targets, loss_of in common.micro_batches(args, step, ranks, rank):
            loss = loss_of(engine(inputs), targets)
            engine.backward(loss * args.accumulate)  # which divides by it
            engine.step()
            total += loss.detach()
        common.show(step, total, ranks)


if __name__ == "__main__":
    main()
