"""Recognises the parallelisms of a script by its objects, and assumes none."""

import gc
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from pardemo import compat
from pardemo.compat import dtype_name, local_part
from pardemo.script.runtime.call_sites import ROOT, CallSites, without_wrappers
from pardemo.script.runtime.hooks import is_deepspeed, outermost
from pardemo.script.step.parallelism import (
    ACTIVATIONS,
    MEGATRON,
    PARAMETERS,
    THEIR_GRADIENTS,
    TIED,
    Boundary,
    CutOptions,
    DdpOptions,
    Fsdp1Options,
    Fsdp2Options,
    Parallelism,
    ParallelismOptions,
    PipelineOptions,
    SeveralModels,
    ZeroOptions,
)  # fmt: skip
from pardemo.script.step.shapes import ExpectedTraffic, Ranks, Shapes, ranks_of, sent_by
from pardemo.script.words import count_text


def dtensor_parallelisms(root: torch.nn.Module, known: Iterable[Parallelism]) -> Iterator[Parallelism]:
    """Recognises tensor parallelism: parameters that are cut along a mesh which no FSDP has."""
    known = list(known)
    taken = {p.ranks for p in known} | {ranks for p in known for ranks in p.options.replicas}
    cut: dict[Ranks, Counter[str]] = {}
    partial: set[Ranks] = set()
    for name, parameter in root.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        for axis, placement in enumerate(parameter.placements):
            ranks = ranks_of(parameter.device_mesh.get_group(axis))
            if isinstance(parameter.grad, DTensor) and parameter.grad.placements[axis].is_partial():
                partial.add(ranks)
            if placement.is_shard() and ranks not in taken:
                module = without_wrappers(name).rpartition(".")[0]
                cut.setdefault(ranks, Counter())[module] += local_part(parameter).nbytes
    for ranks, modules in cut.items():
        yield Parallelism("TP", ranks, tuple(modules), dict(modules), CutOptions("DTensor", ranks in partial))


def megatron_parallelisms(roots: Iterable[torch.nn.Module], shapes: Shapes) -> Iterator[Parallelism]:
    """Recognises Megatron-core's groups, its gradient buckets, and what its stages return."""
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.is_initialized():
        return
    roots = list(roots)
    data = _megatron_buckets(roots)
    yield from data
    bucketed = {p.ranks for p in data}
    for kind, group in (
        ("TP", "tensor_model_parallel"), ("PP", "pipeline_model_parallel"), ("CP", "context_parallel"),
        ("EP", "expert_model_parallel"), ("DP", "data_parallel"),
    ):  # fmt: skip
        ranks = ranks_of(getattr(state, f"get_{group}_group")())
        if len(ranks) < 2 or (kind == "DP" and ranks in bucketed):
            continue
        if kind == "PP":
            yield _stage(state, ranks, roots, shapes)
        else:
            yield Parallelism(kind, ranks, (MEGATRON,), {}, CutOptions(MEGATRON))


def _megatron_buckets(roots: list[torch.nn.Module]) -> list[Parallelism]:
    """Returns Megatron-core's buckets, in which gradients are summed and parameters gathered."""
    ddp: Any = sys.modules.get("megatron.core.distributed.distributed_data_parallel")
    traffic: dict[Ranks, list[ExpectedTraffic]] = {}
    optimizers = _optimizers()
    for part in (part for root in roots for part in root.modules() if ddp is not None):
        if not isinstance(part, ddp.DistributedDataParallel):
            continue
        for buffer in [*part.buffers, *part.expert_parallel_buffers]:
            ranks = ranks_of(buffer.data_parallel_group)
            for bucket in buffer.buckets if len(ranks) > 1 else ():
                of_buckets, gradients = traffic.setdefault(ranks, []), bucket.grad_data
                if part.ddp_config.use_distributed_optimizer:
                    scattered = "gradients of a bucket, summed to shards"
                    of_buckets.append(_once("reduce-scatter", ranks, gradients, scattered))
                    gathered = _once("all-gather", ranks, bucket.param_data, PARAMETERS)
                    of_buckets.append(replace(gathered, optimizers=optimizers))
                else:
                    of_buckets.append(_once("all-reduce", ranks, gradients, "gradients of a bucket, summed"))
    buckets_of_groups = []
    for ranks, of_buckets in traffic.items():
        gradients = [summed.whole or 0 for summed in of_buckets if summed.kind != "all-gather"]
        sizes = {f"bucket {number}": nbytes for number, nbytes in enumerate(gradients)}
        wraps = (f"{count_text(len(sizes), 'bucket')} of gradients",)
        buckets_of_groups.append(Parallelism("DP", ranks, wraps, sizes, CutOptions(MEGATRON, traffic=of_buckets)))
    return buckets_of_groups


def _optimizers() -> int:
    """Counts Megatron-core's distributed optimizers: each has a model's parameters gathered."""
    module = sys.modules.get("megatron.core.optimizer.distrib_optimizer")
    return sum(type(thing) is module.DistributedOptimizer for thing in gc.get_objects()) if module else 0


def _once(kind: str, ranks: Ranks, tensor: torch.Tensor, carried: str) -> ExpectedTraffic:
    """Predicts the traffic of a call that a step has once, in whatever phase."""
    nbytes = sent_by(kind, tensor.nbytes, len(ranks))
    return ExpectedTraffic(ranks, kind, carried, nbytes, tensor.numel(), whole=tensor.nbytes)


def _stage(state: Any, ranks: Ranks, roots: list[torch.nn.Module], shapes: Shapes) -> Parallelism:
    """Returns this rank's stage of Megatron-core's pipeline; of interleaved ones only that they are there."""
    index = ranks.index(dist.get_rank())
    name = f"stage {index} of {len(ranks)}"
    models = [root for root in roots if any(hasattr(part, "post_process") for part in root.modules())]
    if len(models) != 1:
        return Parallelism("PP", ranks, (f"{name}, interleaved",), {}, PipelineOptions(MEGATRON))
    options = PipelineOptions(MEGATRON, boundaries=_boundary(ranks, index, models[0], shapes))
    inner: Any = next(part for part in models[0].modules() if hasattr(part, "post_process"))
    if getattr(inner, "share_embeddings_and_output_weights", False) and (inner.pre_process or inner.post_process):
        tied_ranks = ranks_of(state.get_embedding_group())
        weight = inner.shared_embedding_or_output_weight()
        if len(tied_ranks) > 1 and weight.requires_grad and index == 0:
            tied = _once("all-reduce", tied_ranks, getattr(weight, "main_grad", weight), TIED)
            options = replace(options, traffic=(tied,))
    return Parallelism("PP", ranks, (name,), {}, options)


def _boundary(ranks: Ranks, index: int, stage: torch.nn.Module, shapes: Shapes) -> tuple[Boundary, ...]:
    """Returns the boundary behind a rank's only stage; none behind the last."""
    if index + 1 == len(ranks):
        return ()
    return (Boundary(ranks[index], ranks[index + 1], shapes.outputs.setdefault(stage, {})),)


def pipeline_parallelisms(shapes: Shapes) -> Iterator[Parallelism]:
    """Recognises the stages of torch.distributed.pipelining on this rank."""
    pipelining = sys.modules.get("torch.distributed.pipelining.stage")
    if pipelining is None:
        return
    by_group: dict[Ranks, list[Any]] = {}
    for thing in gc.get_objects():
        if type(thing) is pipelining.PipelineStage:
            by_group.setdefault(ranks_of(thing.group or dist.GroupMember.WORLD), []).append(thing)
    for ranks, of_group in by_group.items():
        names = tuple(f"stage {stage.stage_index} of {stage.num_stages}" for stage in of_group)
        boundaries = []
        for stage in of_group:
            rank_of = stage.stage_index_to_group_rank
            if not stage.is_last and rank_of[stage.stage_index] != rank_of[stage.stage_index + 1]:
                outputs = shapes.outputs.setdefault(stage.submod, {})
                sender, receiver = (ranks[rank_of[stage.stage_index + ahead]] for ahead in (0, 1))
                boundaries.append(Boundary(sender, receiver, outputs))
        options = PipelineOptions("torch.distributed.pipelining", boundaries=tuple(boundaries))
        yield Parallelism("PP", ranks, names, {}, options)


def deepspeed_parallelisms(roots: Iterable[torch.nn.Module], shapes: Shapes) -> Iterator[Parallelism]:
    """Recognises this rank's stage of DeepSpeed's pipeline, and its replicas."""
    pipe: Any = sys.modules.get("deepspeed.runtime.pipe.module")
    for root in roots if pipe is not None else ():
        if not isinstance(root, pipe.PipelineModule):
            continue
        grid: Any = root.mpu()
        ranks, index = ranks_of(grid.get_pipe_parallel_group()), grid.get_stage_id()
        if len(ranks) > 1:
            options = PipelineOptions("DeepSpeed", boundaries=_boundary(ranks, index, root, shapes))
            yield Parallelism("PP", ranks, (f"stage {index} of {len(ranks)}",), {}, options)
        replicas = ranks_of(grid.get_data_parallel_group())
        trained = [parameter for parameter in root.parameters() if parameter.requires_grad]
        if len(replicas) > 1 and trained:
            gradients = torch.empty(sum(p.numel() for p in trained), dtype=trained[0].dtype, device="meta")
            summed = replace(_once("all-reduce", replicas, gradients, "gradients, summed whole"), elements=0)
            yield Parallelism("DP", replicas, ("gradients",), {}, CutOptions("DeepSpeed", traffic=(summed,)))


def with_traffic(
    parallelisms: list[Parallelism], shapes: Shapes, first: int, vocabularies: Iterable[int]
) -> list[Parallelism]:
    """Returns the parallelisms with the traffic that formulas predict for the median step from step ``first`` on."""
    of_group = shapes.traffic(first, vocabularies)
    with_them = []
    for parallelism in parallelisms:
        options: ParallelismOptions = parallelism.options
        if isinstance(options, Fsdp2Options):
            options = replace(options, runs={unit: shapes.times(unit, first) for unit in parallelism.wraps})
        elif isinstance(options, CutOptions):
            traffic = [*options.traffic, *of_group.pop((parallelism.kind, parallelism.ranks), [])]
            if isinstance(options, PipelineOptions):
                for sender, receiver, outputs in options.boundaries:
                    nbytes, elements = shapes.median(outputs, first)
                    for ends, carries in (((sender, receiver), ACTIVATIONS), ((receiver, sender), THEIR_GRADIENTS)):
                        traffic.append(ExpectedTraffic(ends, "send", carries, nbytes, elements))
                options = replace(options, boundaries=())
            options = replace(options, traffic=traffic)
        with_them.append(replace(parallelism, options=options))
    for (kind, ranks), sent in of_group.items():
        wraps = ("attention" if kind == "CP" else "activations",)
        with_them.append(Parallelism(kind, ranks, wraps, {}, CutOptions("torch", traffic=sent)))
    return with_them


def recognised(sites: CallSites, shapes: Shapes) -> list[Parallelism]:
    """Recognises the parallelisms of the models that have run, and of the pipelines and groups that exist."""
    roots = outermost(sites.roots)
    parallelisms: list[Parallelism] = []
    for root in roots:
        parallelisms += [*_ddp(root), *_fsdp2(root), *_fsdp1(root), *_deepspeed(root)]
    parallelisms = _trained(_models_together(parallelisms))
    for root in roots:
        parallelisms += dtensor_parallelisms(root, parallelisms)
    parallelisms += megatron_parallelisms(roots, shapes)
    return [*parallelisms, *deepspeed_parallelisms(roots, shapes), *pipeline_parallelisms(shapes)]


def describe_model(sites: CallSites) -> dict[str, Any]:
    """Describes the parameters of what has run: their number, dtypes, frozen ones, and those with two names."""
    count = frozen = 0
    dtypes: Counter[str] = Counter()
    tied: dict[str, None] = {}
    kinds: list[str] = []
    of_others: set[int] = set()  # a script may call a model in two wrappers
    for root in sites.models():
        names: dict[int, str] = {}
        flat = [unit for part in root.modules() if _is_fsdp1(part) and (unit := compat.fsdp1_unit(part))]
        for name, parameter in root.named_parameters(remove_duplicate=False):
            name = without_wrappers(name)
            if id(parameter) in of_others or names.get(id(parameter)) == name:  # one wrapper shows it under two names
                continue
            if id(parameter) in names:
                tied[f"{names[id(parameter)]} = {name}"] = None
                continue
            names[id(parameter)] = name
            elements = getattr(parameter, "ds_numel", parameter.numel())  # DeepSpeed's, of which a rank has a shard
            count += elements
            frozen += 0 if parameter.requires_grad else elements
            dtypes[dtype_name(parameter.dtype)] += elements
        if flat:  # what its parameters show is their shards
            count = sum(elements for _, elements, _, _ in flat)
            dtypes = Counter({next(iter(dtypes), ""): count})
        of_others |= names.keys()
        if names:
            kinds.append(type(unwrapped(root)).__name__)
    return {
        "classes": kinds, "parameters": count, "frozen": frozen, "dtypes": dict(dtypes), "tied": list(tied),
        "copied": sum(parameter.numel() for copy in sites.copies() for parameter in copy.parameters()),
        "recomputed": sorted(sites.recomputed), "computed_in": sorted(sites.computed_in),
    }  # fmt: skip


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Returns the reader's own model without its wrappers."""
    while isinstance(wrapped := getattr(module, "module", None), torch.nn.Module):
        module = wrapped
    return module


def _ddp(root: torch.nn.Module) -> Iterator[Parallelism]:
    for part in root.modules():
        if isinstance(part, torch.nn.parallel.DistributedDataParallel):
            trained = {n: p for n, p in part.module.named_parameters() if p.requires_grad}
            ignored = part.parameters_to_ignore
            sizes = {without_wrappers(n): local_part(p).nbytes for n, p in trained.items() if n not in ignored}
            ranks = ranks_of(part.process_group)
            options = DdpOptions(
                part.bucket_bytes_cap / 2**20,
                part.find_unused_parameters,
                part.static_graph,
                _buckets(part, list(sizes)),
                _rows_used(part.module),
                [without_wrappers(n) for n, p in trained.items() if p.grad is None or not p.grad.any()],
            )
            yield Parallelism("DDP", ranks, (type(part.module).__name__,), sizes, options)


def _buckets(ddp: torch.nn.Module, names: list[str]) -> list[list[str]]:
    """Returns each bucket's parameters in the order in which DDP waits for them; none where it logs none."""
    logged = compat.ddp_logged(ddp)
    numbers = logged.get("rebuilt_per_bucket_param_indices") or logged.get("initial_per_bucket_param_indices") or ""
    buckets = [[int(number) for number in bucket.split()] for bucket in str(numbers).split(",")]
    if sorted(number for bucket in buckets for number in bucket) != list(range(len(names))):
        return []
    return [[names[number] for number in bucket] for bucket in buckets]


def _models_together(parallelisms: list[Parallelism]) -> list[Parallelism]:
    """Several models under DDP over the same ranks as one: a step may train one of them, and whose bytes are whose is
    not to be seen."""
    together: dict[Ranks, list[Parallelism]] = {}
    for parallelism in parallelisms:
        if parallelism.kind == "DDP":
            together.setdefault(parallelism.ranks, []).append(parallelism)
    joined = [
        Parallelism("DDP", ranks, tuple(name for p in of_ranks for name in p.wraps), {}, SeveralModels(len(of_ranks)))
        for ranks, of_ranks in together.items()
        if len(of_ranks) > 1
    ]
    return [p for p in parallelisms if p.kind != "DDP" or len(together[p.ranks]) == 1] + joined


def _trained(parallelisms: list[Parallelism]) -> list[Parallelism]:
    """Returns the model that is trained of two with the same units, as a teacher and a student."""

    def is_trained(p: Parallelism) -> bool:
        return not isinstance(p.options, Fsdp1Options | Fsdp2Options) or any(p.options.gradient_bytes.values())

    trained = {(p.kind, p.ranks, p.wraps) for p in parallelisms if is_trained(p)}
    return [p for p in parallelisms if is_trained(p) or (p.kind, p.ranks, p.wraps) not in trained]


def _rows_used(module: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """Counts the gradient's rows that are not zero, and all, of embeddings with a dense gradient of their own."""
    counts = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    rows = {}
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.Embedding) and counts[id(part.weight)] == 1:
            gradient = part.weight.grad
            if gradient is not None and gradient.layout == torch.strided:
                used = int((gradient != 0).any(dim=1).sum())
                rows[f"{without_wrappers(name)}.weight"] = (used, part.num_embeddings)
    return rows


def _fsdp2(root: torch.nn.Module) -> Iterator[Parallelism]:
    of_groups: dict[tuple[Ranks, Ranks], tuple[dict[str, int], Fsdp2Options]] = {}
    shapes = {without_wrappers(n): list(p.shape) for n, p in root.named_parameters()}
    dtypes: set[str] = set()
    for name, part in root.named_modules():
        for group in compat.fsdp_groups(compat.fsdp_state(part)) if compat.fsdp_state(part) is not None else []:
            if group is None or group.modules[0] is not part:
                continue
            mesh = group.mesh_info
            shard, second = ranks_of(mesh.shard_process_group), getattr(mesh, "replicate_process_group", None)
            replicas = () if second is None else ranks_of(second)
            new = Fsdp2Options(replicas=(replicas,) if replicas else (), shapes=shapes)
            unit_bytes, options = of_groups.setdefault((shard, replicas), ({}, new))
            unit = without_wrappers(compat.fsdp_unit(group) or name) or ROOT  # several modules may be one unit
            gathered = scattered = 0
            for parameter in group.fsdp_params:
                elements = parameter.padded_sharded_param_size.numel() * len(shard)
                policy = parameter.mp_policy  # from torch 2.15 on the group has none: a parameter may have its own
                dtype = policy.param_dtype or parameter.sharded_param.dtype
                gathered += elements * dtype.itemsize
                if parameter.sharded_param.requires_grad:
                    scattered += elements * (policy.reduce_dtype or dtype).itemsize
                dtypes.add(dtype_name(dtype))
            unit_bytes[unit], options.gradient_bytes[unit] = gathered, scattered
            options.reshard_after_forward[unit] = group.post_forward_mesh_info is not None
    for (shard, replicas), (unit_bytes, options) in of_groups.items():
        kind, options = "HSDP" if replicas else "FSDP2", replace(options, gathered_in=sorted(dtypes))
        yield Parallelism(kind, shard, tuple(unit_bytes), unit_bytes, options)


def _is_fsdp1(module: torch.nn.Module) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return isinstance(module, FullyShardedDataParallel)


def _fsdp1(root: torch.nn.Module) -> Iterator[Parallelism]:
    units = {without_wrappers(n) or ROOT: part for n, part in root.named_modules() if _is_fsdp1(part)}
    if units:
        first = next(iter(units.values()))
        ranks = ranks_of(first.process_group)
        sizes, gradients = {}, {}
        for name, part in units.items():
            if (unit := compat.fsdp1_unit(part)) is not None:
                shard, _, gathered, reduced = unit
                sizes[name], gradients[name] = (shard * len(ranks) * dtype.itemsize for dtype in (gathered, reduced))
        strategy = str(first.sharding_strategy).rpartition(".")[2]
        yield Parallelism("FSDP1", ranks, tuple(units), sizes, Fsdp1Options(strategy, gradients))


def _deepspeed(root: Any) -> Iterator[Parallelism]:
    if not is_deepspeed(root):
        return
    stage = root.zero_optimization_stage()
    data_ranks = ranks_of(root.data_parallel_group)
    sizes: dict[Ranks, dict[str, int]] = {data_ranks: {}}
    for name, parameter in root.module.named_parameters():
        ranks = data_ranks
        if not getattr(parameter, "allreduce", True):  # an expert's, which other ranks than all may have as well
            ranks = ranks_of(compat.expert_group(parameter))
        nbytes = getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()
        sizes.setdefault(ranks, {})[name] = nbytes
    kind = f"DeepSpeed ZeRO-{stage}" if stage else "DeepSpeed"
    options = ZeroOptions(root.gradient_accumulation_steps(), stage)
    for ranks, of_ranks in sizes.items():
        if ranks == data_ranks or len(ranks) > 1:
            unit = type(root.module).__name__ if ranks == data_ranks else "experts"
            yield Parallelism(kind, ranks, (unit,), of_ranks, options)
