"""A case trained on ranks, and how far that is from one process."""

import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from pardemo.collectives import parameter_server_all_reduce, ring_all_reduce
from pardemo.data_parallel import BucketedDataParallel, NaiveDataParallel, shard_weight
from pardemo.groups import Groups, ParallelDims
from pardemo.pipeline_parallel import Pipeline, Schedule, gpipe, interleaved, one_f_one_b
from pardemo.pipeline_parallel.executor import Tensors
from pardemo.soak.layouts import models
from pardemo.soak.layouts.case import Case
from pardemo.soak.layouts.comparison import Comparison, gradients_as_model
from pardemo.soak.layouts.one_process import (
    averaged,
    in_two_groups,
    make_optimizer,
    one_process,
    optimizer_of,
    uses_sometimes,
)
from pardemo.zero import Zero1, Zero2, Zero3
from pardemo.zero.engine import Engine
from pardemo.zero.gradient_norm import clip_grad_norm_

ORDERS = {"gpipe": gpipe, "one_f_one_b": one_f_one_b, "interleaved": interleaved}


@dataclass(frozen=True)
class Found:
    """What a rank has to say: the worst comparison, and a checksum of the parameters that its copies have too."""

    worst: float  # error over bound
    what: str
    checksum: str
    place: dict[str, int]  # of the rank, by axis


def train_and_compare(case: Case) -> Found:
    """Runs on every rank: the case in parallel, then in this process alone."""
    layout = ParallelDims(tp=case.tp, dp=case.dp, pp=case.pp)
    with Groups(layout) as groups, torch.random.fork_rng():
        found, alone = in_parallel(case, groups, layout), one_process(case)
        initial = models.place(models.plain(case), case, groups)
        comparison = Comparison(case)
        comparison.losses(found.losses, alone.losses)
        if found.gradients is not None:
            comparison.gradients(found.gradients, models.place(alone.first_gradients, case, groups))
        comparison.parameters(found.chunks, models.place(alone.model, case, groups), initial)
        if found.masters is not None:
            comparison.masters(found.masters, models.place(alone.masters, case, groups), initial)
        if found.average is not None:
            assert alone.average is not None
            comparison.parameters([found.average], models.place(alone.average, case, groups), initial)
        digest = hashlib.sha256()
        for chunk in found.chunks:
            for value in (*chunk.parameters(), *chunk.buffers()):
                digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return Found(comparison.worst, comparison.what, digest.hexdigest(), layout.coordinates(dist.get_rank()))


def verdict(found: list[Found]) -> str | None:
    """What is wrong with a case; None where nothing is."""
    worst = max(found, key=lambda one: one.worst)
    if not worst.worst <= 1:
        return f"{worst.what}: {worst.worst:.3g} times what rounding explains, on the rank at {worst.place}"
    copies: dict[tuple[int, int], set[str]] = {}
    for one in found:
        copies.setdefault((one.place["tp"], one.place["pp"]), set()).add(one.checksum)
    if any(len(checksums) > 1 for checksums in copies.values()):
        return "data-parallel copies differ in some bit"
    return None


@dataclass
class Trained:
    """What a rank has in the end."""

    losses: list[float | None]  # of the steps; None on ranks that have none
    gradients: list[nn.Sequential] | None  # of the first step; None where an engine keeps them in shards
    chunks: list[nn.Sequential]
    masters: list[nn.Sequential] | None  # the chunks as ZeRO's optimizer has them, in fp32
    average: nn.Module | None  # of the model over the steps, where one is kept


def in_parallel(case: Case, groups: Groups, layout: ParallelDims) -> Trained:
    """Trains the case on the ranks of the group."""
    chunks = models.place(models.plain(case), case, groups)
    if dist.get_rank(groups.dp):
        with torch.no_grad():
            for chunk in chunks:
                for p in chunk.parameters():
                    p.add_(1)  # the engine has to make all copies begin as the first one
                for buffer in chunk.buffers():
                    buffer.copy_(torch.ones(buffer.shape))
    trained = {f"{i}.{name}": p for i, c in enumerate(chunks) for name, p in c.named_parameters() if p.requires_grad}
    losses: list[float | None] = []
    gradients: list[nn.Sequential] | None = None
    over = groups.pp if case.pp > 1 else None
    with _tied(case, chunks, layout) as tied:
        wrapped = [_wrap(case, chunk, groups, tied) for chunk in chunks]
        engines = [each for each in wrapped if isinstance(each, Engine)]  # of ZeRO: they have the optimizer
        optimizer = None if case.is_zero else optimizer_of(case, trained)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=case.scaler)
        run, average = _runner(case, wrapped, groups, tied, scaler), averaged(case, wrapped[0])

        def forward_and_backward(step: int) -> float:
            """The loss, as a closure returns it; not a number on a rank that has none."""
            nonlocal gradients
            loss = _mean(run(step), groups.dp)
            losses.append(loss)
            told = float("nan") if loss is None else loss
            if optimizer is None:
                return told
            scaler.unscale_(optimizer)
            gradients = gradients or [gradients_as_model(chunk) for chunk in chunks]
            if case.clip is not None and case.clip_by_torch:
                nn.utils.clip_grad_norm_(wrapped[0].parameters(), case.clip)
            elif case.clip is not None:
                clip_grad_norm_(nn.ModuleList(chunks), case.clip, over=over, tied=tied)
            return told

        for step in range(case.steps):
            if case.discard:
                run(step)
                for chunk in chunks:
                    chunk.zero_grad()
            if case.closure and optimizer is not None:
                optimizer.step(partial(forward_and_backward, step))
            else:
                forward_and_backward(step)
                for engine in engines:
                    if case.clip_by_torch and case.clip is not None:
                        nn.utils.clip_grad_norm_(engine.parameters(), case.clip)
                    engine.step()
                if optimizer is not None:
                    scaler.step(optimizer)
                    scaler.update()
            if optimizer is not None:
                optimizer.zero_grad(case.set_to_none)
            if average is not None:
                average.update_parameters(wrapped[0])
    in_fp32 = [_masters(engine) for engine in engines]
    for engine in engines:
        engine.close()
    masters = [_with_values(chunk, of) for chunk, of in zip(chunks, in_fp32, strict=True)] if engines else None
    kept = None if average is None else average.module.module  # of the average of the wrapper
    assert kept is None or isinstance(kept, nn.Module)
    return Trained(losses, gradients, chunks, masters, kept)


def _masters(engine: Engine) -> dict[nn.Parameter, torch.Tensor]:
    """Of each trained parameter the values that the optimizer updates, whole: from all ranks' chunks. Collective."""
    found: dict[nn.Parameter, torch.Tensor] = {}
    for unit in engine.trained:
        assert unit.master is not None, "it is trained"
        flat = unit.master.new_empty(unit.chunk * engine.size)
        dist.all_gather_into_tensor(flat, unit.master.detach(), group=engine.group)
        found |= zip(unit.parameters, unit.views(flat), strict=True)
    return found


def _with_values(chunk: nn.Sequential, values: dict[nn.Parameter, torch.Tensor]) -> nn.Sequential:
    """A copy of a chunk in fp32, with these values; those of other parameters are the chunk's."""
    copied = copy.deepcopy(chunk).float()
    with torch.no_grad():
        for p, own in zip(copied.parameters(), chunk.parameters(), strict=True):
            if own in values:
                p.copy_(values[own])
    return copied


def _wrap(case: Case, chunk: nn.Module, groups: Groups, tied: list) -> nn.Module:
    if not case.compiled:
        return _engine(case, chunk, groups, tied)
    torch.compiler.reset()
    if case.compiled == "inside":
        return _engine(case, _compiled(chunk), groups, tied)
    return _compiled(_engine(case, chunk, groups, tied))


def _compiled(module: nn.Module) -> nn.Module:
    compiled = torch.compile(module, backend="aot_eager")
    assert isinstance(compiled, nn.Module)
    return compiled


def _engine(case: Case, chunk: nn.Module, groups: Groups, tied: list) -> nn.Module:
    if not case.engine:
        return chunk
    if case.engine == "naive":
        how = parameter_server_all_reduce if case.parameter_server else ring_all_reduce
        return NaiveDataParallel(chunk, groups.dp, all_reduce=how)
    if case.engine == "bucketed":
        return BucketedDataParallel(chunk, groups.dp, bucket_bytes=case.bucket_bytes, overlap=case.overlap)
    shared: dict = {
        "max_norm": None if case.clip_by_torch else case.clip,
        "tied": [pair for pair in tied if pair[0] in set(chunk.parameters())],
    }
    if case.pp > 1:
        shared["norm_over"] = groups.pp
    if case.param_groups:
        shared["param_groups"] = in_two_groups(p for p in chunk.parameters() if p.requires_grad)
    if case.engine == "zero1":
        return Zero1(chunk, make_optimizer(case), groups.dp, **shared)
    if case.engine == "zero2":
        return Zero2(chunk, make_optimizer(case), groups.dp, bucket_bytes=case.bucket_bytes, **shared)
    layers: list[nn.Module] | None = None if case.layers_alone else []
    return Zero3(chunk, make_optimizer(case), groups.dp, layers=layers, prefetch=case.prefetch, **shared)


def _runner(
    case: Case, wrapped: list[nn.Module], groups: Groups, tied: list, scaler: torch.amp.GradScaler
) -> Callable[[int], float | None]:
    """``run(step)``: forward and backward of a step; its loss on this rank, None where it is not known."""
    if case.pp == 1:
        micros = range(case.accumulation)
        return lambda step: sum(_backward(case, wrapped[0], groups, step, micro, scaler) for micro in micros)
    schedule = Schedule(ORDERS[case.schedule], case.pp, case.micro_batches, case.chunks)
    mean = models.parallel_loss(case, groups)

    def loss_of(logits: Tensors, targets: Tensors) -> torch.Tensor:
        assert isinstance(logits, torch.Tensor), "a stage gives one tensor"
        assert isinstance(targets, torch.Tensor), "a batch has one of targets"
        return mean(logits, targets) / case.accumulation

    recomputed = case.recompute_stages
    pipeline = Pipeline(wrapped, schedule, loss_of, groups.pp, checkpointing=recomputed, tied=tied)

    def run(step: int) -> float | None:
        parts = (models.batch(case, step, micro)[dist.get_rank(groups.dp)] for micro in range(case.accumulation))
        losses = [loss.item() for part in parts if (loss := pipeline.step(*part)) is not None]
        return sum(losses) if losses else None

    return run


def _backward(
    case: Case, model: nn.Module, groups: Groups, step: int, micro: int, scaler: torch.amp.GradScaler
) -> float:
    rank = dist.get_rank(groups.dp)
    tokens, targets = models.batch(case, step, micro)[rank]
    models.switch(model, on=uses_sometimes(step, micro, rank))
    weight = shard_weight(len(tokens), groups.dp) / case.accumulation
    loss = models.parallel_loss(case, groups)(model(tokens), targets) * weight
    waits = case.no_sync and micro < case.accumulation - 1
    # asked for by name: what torch.compile makes of a wrapper has it, too, and is no Wrapper
    with getattr(model, "no_sync", contextlib.nullcontext)() if waits else contextlib.nullcontext():
        scaler.scale(loss).backward()
    return loss.item()


@contextlib.contextmanager
def _tied(case: Case, chunks: list[nn.Sequential], layout: ParallelDims) -> Iterator[list]:
    """This rank's copy of the embedding, with the group of the first and the last stage that share it."""
    if not case.tied or case.pp == 1 or "0" in case.frozen:
        yield []
        return
    pairs = [
        [layout.rank(tp=tp, dp=dp, pp=pp) for pp in (0, case.pp - 1)] for tp in range(case.tp) for dp in range(case.dp)
    ]
    groups = [(pair, dist.new_group(pair)) for pair in pairs]
    mine = next((group for pair, group in groups if dist.get_rank() in pair), None)
    if mine is None:
        yield []
    else:
        first = layout.coordinates(dist.get_rank())["pp"] == 0
        yield [(models.tied_weight(chunks[0][0] if first else chunks[-1][-1]), mine)]
        dist.destroy_process_group(mine)


def _mean(loss: float | None, group: dist.ProcessGroup) -> float | None:
    if loss is None:
        return None
    total = torch.tensor([loss], dtype=torch.float64)
    dist.all_reduce(total, group=group)
    return total.item() / dist.get_world_size(group)
