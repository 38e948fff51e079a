"""What is running: the parallelisms that a script's objects have, recognised by what they are, never assumed."""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from pardemo import compat
from pardemo.measure import running_cut
from pardemo.measure.parallelism import Parallelism
from pardemo.measure.places import ROOT, Places, without_wrappers
from pardemo.measure.shapes import Shapes, local


def recognised(places: Places, shapes: Shapes) -> list[Parallelism]:
    """The parallelisms of the models that have run, and of the pipelines and groups that are there."""
    roots = _outermost(places.roots)
    found: list[Parallelism] = []
    for root in roots:
        found += [*_ddp(root, places), *_fsdp2(root, places), *_fsdp1(root, places), *_deepspeed(root)]
    found = _trained_ones(_models_together(found))
    for root in roots:
        found += running_cut.dtensors(root, found)
    found += running_cut.megatron(roots, shapes)
    return [*found, *running_cut.deepspeeds(roots, shapes), *running_cut.pipelines(shapes)]


def model(places: Places) -> dict[str, Any]:
    """Parameters of what has run: how many, of which dtypes, how many frozen, which are one under two names."""
    count = frozen = 0
    dtypes: dict[str, int] = {}
    tied: list[str] = []
    kinds: list[str] = []
    for root in _outermost(places.roots):
        names: dict[int, str] = {}
        flat = [unit for part in root.modules() if _is_fsdp1(part) and (unit := compat.fsdp1_unit(part))]
        for name, parameter in root.named_parameters(remove_duplicate=False):
            name = without_wrappers(name)
            if names.get(id(parameter)) == name:  # a wrapper shows the model under two names
                continue
            if id(parameter) in names:
                tied.append(f"{names[id(parameter)]} = {name}")
                continue
            names[id(parameter)] = name
            elements = getattr(parameter, "ds_numel", parameter.numel())  # DeepSpeed's, of which a rank has a shard
            count += elements
            frozen += 0 if parameter.requires_grad else elements
            dtype = str(parameter.dtype).removeprefix("torch.")
            dtypes[dtype] = dtypes.get(dtype, 0) + elements
        if flat:  # what its parameters show is their shards
            count = sum(elements for _, elements, _, _ in flat)
            dtypes = {next(iter(dtypes), ""): count}
        if names:
            kinds.append(type(inner(root)).__name__)
    return {
        "classes": kinds, "parameters": count, "frozen": frozen, "dtypes": dtypes, "tied": tied,
        "recomputed": sorted(places.recomputed), "computed_in": sorted(places.computed_in),
    }  # fmt: skip


def inner(module: torch.nn.Module) -> torch.nn.Module:
    """The reader's own model in its wrappers."""
    while isinstance(wrapped := getattr(module, "module", None), torch.nn.Module):
        module = wrapped
    return module


def _outermost(roots: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Those of the called modules that no other one has, with parameters."""
    kept = [root for root in roots if next(root.parameters(), None) is not None]
    within = {id(part) for root in kept for part in root.modules() if part is not root}
    return [root for root in kept if id(root) not in within]


def _ddp(root: torch.nn.Module, places: Places) -> Iterator[Parallelism]:
    for part in root.modules():
        if isinstance(part, torch.nn.parallel.DistributedDataParallel):
            trained = {n: p for n, p in part.module.named_parameters() if p.requires_grad}
            ignored = part.parameters_to_ignore
            sizes = {without_wrappers(n): local(p).nbytes for n, p in trained.items() if n not in ignored}
            ranks = tuple(dist.get_process_group_ranks(part.process_group))
            options = {
                "bucket_cap_mb": part.bucket_bytes_cap / 2**20,
                "find_unused_parameters": part.find_unused_parameters,
                "static_graph": part.static_graph,
                "buckets": _buckets(part, list(sizes)),
                **_rows_used(part.module),
                "unused": [without_wrappers(n) for n, p in trained.items() if p.grad is None or not p.grad.any()],
            }
            yield Parallelism("DDP", ranks, (type(part.module).__name__,), sizes, options)


def _buckets(ddp: torch.nn.Module, names: list[str]) -> list[list[str]]:
    """Of each bucket its parameters, in the order in which DDP waits for them; none where it does not log them."""
    logged = compat.ddp_logged(ddp)
    numbers = logged.get("rebuilt_per_bucket_param_indices") or logged.get("initial_per_bucket_param_indices") or ""
    buckets = [[int(number) for number in bucket.split()] for bucket in str(numbers).split(",")]
    if sorted(number for bucket in buckets for number in bucket) != list(range(len(names))):
        return []
    return [[names[number] for number in bucket] for bucket in buckets]


def _models_together(found: list[Parallelism]) -> list[Parallelism]:
    """Several models under DDP over the same ranks as one: a step may train one of them, and whose bytes are whose is
    not to be seen."""
    together: dict[tuple[int, ...], list[Parallelism]] = {}
    for one in found:
        if one.kind == "DDP":
            together.setdefault(one.ranks, []).append(one)
    several = {ranks: some for ranks, some in together.items() if len(some) > 1}
    kept = [one for one in found if one.kind != "DDP" or one.ranks not in several]
    return kept + [
        Parallelism("DDP", ranks, tuple(name for one in some for name in one.wraps), {}, {"models": len(some)})
        for ranks, some in several.items()
    ]


def _trained_ones(found: list[Parallelism]) -> list[Parallelism]:
    """Of two models with the same units, as a teacher and a student, the one that is trained: units go by names."""
    trained = {(one.kind, one.ranks, one.wraps) for one in found if any(one.options.get("gradient_bytes", {}).values())}
    return [
        one for one in found
        if any(one.options.get("gradient_bytes", {0: 1}).values()) or (one.kind, one.ranks, one.wraps) not in trained
    ]  # fmt: skip


def _rows_used(module: torch.nn.Module) -> dict[str, Any]:
    """Of each embedding whose gradient is dense and nobody else's: how many rows of it are not zero."""
    counts: dict[int, int] = {}
    for _, parameter in module.named_parameters(remove_duplicate=False):
        counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    rows = {}
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.Embedding) and counts.get(id(part.weight)) == 1:
            gradient = part.weight.grad
            if gradient is not None and gradient.layout == torch.strided:
                used = int((gradient != 0).any(dim=1).sum())
                rows[f"{without_wrappers(name)}.weight"] = (used, part.num_embeddings)
    return {"rows_used": rows}


def _fsdp2(root: torch.nn.Module, places: Places) -> Iterator[Parallelism]:
    units: dict[tuple[str, tuple[int, ...], tuple[int, ...]], dict[str, tuple[int, int, bool]]] = {}
    dtypes: set[str] = set()
    for name, part in root.named_modules():
        for group in compat.fsdp_groups(compat.fsdp_state(part)) if compat.fsdp_state(part) is not None else []:
            if group is None or group.modules[0] is not part:
                continue
            mesh = group.mesh_info
            shard = tuple(dist.get_process_group_ranks(mesh.shard_process_group))
            replicas: tuple[int, ...] = ()
            if getattr(mesh, "replicate_process_group", None) is not None:
                replicas = tuple(dist.get_process_group_ranks(mesh.replicate_process_group))
            policy = group.mp_policy
            gathered = scattered = 0
            for parameter in group.fsdp_params:
                elements = parameter.padded_sharded_param_size.numel() * len(shard)
                of = parameter.sharded_param.dtype
                gathered += elements * _size(policy.param_dtype or of)
                if parameter.sharded_param.requires_grad:
                    scattered += elements * _size(policy.reduce_dtype or policy.param_dtype or of)
                dtypes.add(str(policy.param_dtype or of).removeprefix("torch."))
            again = group.post_forward_mesh_info is not None
            own = without_wrappers(compat.fsdp_unit(group) or name) or ROOT  # several modules may be one unit
            units.setdefault(("HSDP" if replicas else "FSDP2", shard, replicas), {})[own] = (gathered, scattered, again)
    for (kind, shard, replicas), of_units in units.items():
        options = {
            "gradient_bytes": {name: scattered for name, (_, scattered, _) in of_units.items()},
            "reshard_after_forward": {name: again for name, (_, _, again) in of_units.items()},
            "replicas": (replicas,) if replicas else (),
            "gathered_in": sorted(dtypes),
            "shapes": {without_wrappers(n): list(p.shape) for n, p in root.named_parameters()},
        }
        sizes = {name: gathered for name, (gathered, _, _) in of_units.items()}
        yield Parallelism(kind, shard, tuple(of_units), sizes, options)


def _is_fsdp1(module: torch.nn.Module) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return isinstance(module, FullyShardedDataParallel)


def _fsdp1(root: torch.nn.Module, places: Places) -> Iterator[Parallelism]:
    units = {without_wrappers(n) or ROOT: part for n, part in root.named_modules() if _is_fsdp1(part)}
    if units:
        first = next(iter(units.values()))
        ranks = tuple(dist.get_process_group_ranks(first.process_group))
        sizes, gradients = {}, {}
        for name, part in units.items():
            if (unit := compat.fsdp1_unit(part)) is not None:
                shard, _, gathered, reduced = unit
                sizes[name], gradients[name] = (shard * len(ranks) * _size(dtype) for dtype in (gathered, reduced))
        strategy = str(first.sharding_strategy).rpartition(".")[2]
        options = {"sharding_strategy": strategy, "gradient_bytes": gradients}
        yield Parallelism("FSDP1", ranks, tuple(units), sizes, options)


def _deepspeed(root: torch.nn.Module) -> Iterator[Parallelism]:
    deepspeed = sys.modules.get("deepspeed")
    if deepspeed is None or not isinstance(root, deepspeed.DeepSpeedEngine):
        return
    stage = root.zero_optimization_stage()
    whole = tuple(dist.get_process_group_ranks(root.data_parallel_group))
    sizes: dict[tuple[int, ...], dict[str, int]] = {whole: {}}
    for name, parameter in root.module.named_parameters():
        ranks = whole
        if not getattr(parameter, "allreduce", True):  # an expert's, which other ranks than all may have as well
            ranks = tuple(dist.get_process_group_ranks(compat.expert_group(parameter)))
        nbytes = getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()
        sizes.setdefault(ranks, {})[name] = nbytes
    kind = f"DeepSpeed ZeRO-{stage}" if stage else "DeepSpeed"
    options = {"micro_batches": root.gradient_accumulation_steps(), "stage": stage}
    for ranks, of_ranks in sizes.items():
        if ranks == whole or len(ranks) > 1:
            own = type(root.module).__name__ if ranks == whole else "experts"
            yield Parallelism(kind, ranks, (own,), of_ranks, options)


def _size(dtype: torch.dtype) -> int:
    return torch.empty((), dtype=dtype).element_size()
