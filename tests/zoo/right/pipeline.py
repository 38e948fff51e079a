"""Pipelines, rightly, with data parallelism around them: torch's pipelining; this package's, also of cut layers."""

import itertools

import common
import tensor_parallel
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from pardemo.data_parallel import BucketedDataParallel
from pardemo.groups import Groups, ParallelDims
from pardemo.pipeline_parallel import Pipeline, Schedule, gpipe, interleaved, one_f_one_b
from pardemo.zero.gradient_norm import clip_grad_norm_

TORCHS = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
PARDEMOS = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved}


def chunks_of(args, stages, place):
    """This rank's stages of the model, which is cut into equal parts; a tied head on another rank has its own copy."""
    numbers = range(place, stages, args.pp)
    cuts = [number * args.layers // stages for number in range(stages + 1)]
    return numbers, [common.model_of(args).cut(cuts[n], cuts[n + 1], args.layers) for n in numbers]


def ties(args, place, chunks, groups):
    """The weight that the first and the last stage have a copy of, with the group of both; none in between."""
    if not args.tied:
        return []
    group = None
    for tp, dp in itertools.product(range(args.tp), range(groups.dims.dp)):
        pair = [groups.dims.rank(tp=tp, dp=dp, pp=at) for at in (0, args.pp - 1)]
        made = dist.new_group(pair)
        group = made if dist.get_rank() in pair else group
    if place == 0:
        return [(chunks[0].embed.weight, group)]
    return [(chunks[-1].head.weight, group)] if place == args.pp - 1 else []


def clip_by_hand(args, chunks, tied, group):
    """As torchtitan does it: the norm over all stages, a copy of a weight counted once, then torch's own clipping."""
    copies = {id(parameter) for parameter, holders in tied if dist.get_rank(holders) > 0}
    parameters = [p for chunk in chunks for p in chunk.parameters() if p.grad is not None]
    total = torch.nn.utils.get_total_norm([p.grad for p in parameters if id(p) not in copies]) ** 2
    dist.all_reduce(total, group=group)
    torch.nn.utils.clip_grads_with_norm_(parameters, args.clip, total.sqrt())


def main():
    args = common.arguments()
    dist.init_process_group("gloo")
    ranks = dist.get_world_size() // args.pp // args.tp
    with Groups(ParallelDims(tp=args.tp, pp=args.pp, dp=ranks)) as groups:
        train(args, groups, ranks, dist.get_rank(groups.dp), dist.get_rank(groups.pp))


def train(args, groups, ranks, rank, place):
    kind = next(name for name in TORCHS if name in args.way)
    stages = args.pp * (2 if kind == "interleaved" else 1)
    numbers, chunks = chunks_of(args, stages, place)
    if args.tp > 1:
        chunks = [tensor_parallel.cut_by_pardemo(args, chunk, groups.tp) for chunk in chunks]
    tied = ties(args, place, chunks, groups)
    engines = []
    torch.manual_seed(100 + dist.get_rank())  # each stage of each replica drops elements of its own
    losses = []
    # a schedule takes one function for all steps, and each step's loss counts the tokens of its own
    loss_of = [next(common.micro_batches(args, step, ranks, rank))[2] for step in range(common.STEPS)]
    step = 0

    def loss_now(logits, targets):
        return loss_of[step](logits, targets)

    if args.engine == "pipelining":
        parts = [
            PipelineStage(chunk, number, stages, torch.device("cpu"), group=groups.pp)
            for number, chunk in zip(numbers, chunks, strict=True)
        ]
        part = parts if kind == "interleaved" else parts[0]
        schedule = TORCHS[kind](part, args.accumulate, loss_fn=loss_now, scale_grads=False)

        def run(inputs, targets):
            found = []
            first, last = (inputs,) if place == 0 else (), {"target": targets, "losses": found}
            schedule.step(*first, **(last if place == args.pp - 1 else {}))
            losses.append(sum(loss.detach() for loss in found) if found else 0.0)
    else:
        wrapped = chunks
        if args.engine == "pipeline_zero":
            own = [[pair for pair in tied if pair[0] in set(chunk.parameters())] for chunk in chunks]
            pairs = zip(chunks, own, strict=True)
            wrapped = engines = [
                common.zero_of(args, chunk, groups.dp, pipeline_group=groups.pp, tied=of) for chunk, of in pairs
            ]
        elif "late" not in args.way:
            wrapped = [BucketedDataParallel(chunk, groups.dp) for chunk in chunks]
        order = Schedule(PARDEMOS[kind], args.pp, args.accumulate, len(chunks))
        pipeline = Pipeline(
            wrapped, order, lambda y, t: loss_now(y, t) * args.accumulate, groups.pp, tied=tied,
            checkpointing="checkpoint" in args.way,
        )  # fmt: skip

        def run(inputs, targets):
            losses.append(pipeline.step(inputs, targets))

    by_hand = args.engine == "pipelining" or "late" in args.way
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    optimizers = [each.optimizer for each in engines] or [common.optimizer_of(args, parameters)]
    schedules = [common.schedule_of(args, optimizer) for optimizer in optimizers]
    for step in range(common.STEPS):
        inputs, targets = (whole.tensor_split(ranks)[rank] for whole in common.batch(args, step))
        run(inputs, targets)
        for parameter, holders in tied if args.engine == "pipelining" else ():
            dist.all_reduce(parameter.grad, group=holders)
        for parameter in parameters if by_hand else ():
            if parameter.requires_grad:
                dist.all_reduce(parameter.grad, group=groups.dp)
                parameter.grad /= ranks
        if args.clip and args.engine == "pipelining":
            clip_by_hand(args, chunks, tied, groups.pp)
        elif args.clip and not engines:
            clip_grad_norm_(torch.nn.ModuleList(chunks), args.clip, pipeline_group=groups.pp, tied=tied)
        for one in (*(engines or optimizers), *schedules):
            one.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        common.show(step, losses[-1] if losses[-1] is not None else 0.0, ranks * args.tp)


if __name__ == "__main__":
    main()
