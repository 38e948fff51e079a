"""Models that are cut over ranks: by DTensor, by Megatron-core, into stages; and what their formulas say."""

import gc
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from pardemo.measure.parallelism import Parallelism
from pardemo.measure.places import without_wrappers
from pardemo.measure.shapes import Ranks, Shapes, local, ranks_of, sent_by

MEGATRON = "Megatron-core"
ACTIVATIONS, THEIR_GRADIENTS = "activations, to the next stage", "gradients of activations, to the stage before"
PARAMETERS = "parameters of a bucket, gathered"
TIED = "gradients of the embedding, which the first and the last stage both have"


def dtensors(root: torch.nn.Module, known: Iterable[Parallelism]) -> Iterator[Parallelism]:
    """Parameters that are cut along a mesh that no FSDP has: tensor parallel."""
    known = list(known)
    taken = {one.ranks for one in known} | {ranks for one in known for ranks in one.options.get("replicas", ())}
    cut: dict[Ranks, dict[str, int]] = {}
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
                cut.setdefault(ranks, {})[module] = cut.get(ranks, {}).get(module, 0) + local(parameter).nbytes
    for ranks, modules in cut.items():
        options = {"by": "DTensor", "gradients_unsummed": ranks in partial}
        yield Parallelism("TP", ranks, tuple(modules), modules, options)


def megatron(roots: Iterable[torch.nn.Module], shapes: Shapes) -> Iterator[Parallelism]:
    """Megatron-core's groups, its gradients' buckets, and what its stages return."""
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.is_initialized():
        return
    roots = list(roots)
    data = _buckets(roots)
    yield from data
    there = {one.ranks for one in data}
    for kind, group in (
        ("TP", "tensor_model_parallel"), ("PP", "pipeline_model_parallel"), ("CP", "context_parallel"),
        ("EP", "expert_model_parallel"), ("DP", "data_parallel"),
    ):  # fmt: skip
        ranks = ranks_of(getattr(state, f"get_{group}_group")())
        if len(ranks) < 2 or (kind == "DP" and ranks in there):
            continue
        if kind == "PP":
            yield _stage(state, ranks, roots, shapes)
        else:
            yield Parallelism(kind, ranks, (MEGATRON,), {}, {"by": MEGATRON})


def _buckets(roots: list[torch.nn.Module]) -> list[Parallelism]:
    """Megatron-core's DistributedDataParallel: the buckets in which gradients are summed, and parameters gathered."""
    ddp: Any = sys.modules.get("megatron.core.distributed.distributed_data_parallel")
    terms: dict[Ranks, list[dict[str, Any]]] = {}
    for part in (part for root in roots for part in root.modules() if ddp is not None):
        if not isinstance(part, ddp.DistributedDataParallel):
            continue
        for buffer in [*part.buffers, *part.expert_parallel_buffers]:
            ranks = ranks_of(buffer.data_parallel_group)
            for bucket in buffer.buckets if len(ranks) > 1 else ():
                some = terms.setdefault(ranks, [])
                gradients = bucket.grad_data
                if part.ddp_config.use_distributed_optimizer:
                    some.append(_term("reduce-scatter", ranks, gradients, "gradients of a bucket, summed to shards"))
                    some.append(_term("all-gather", ranks, bucket.param_data, PARAMETERS))
                else:
                    some.append(_term("all-reduce", ranks, gradients, "gradients of a bucket, summed"))
    made = []
    optimizers = _optimizers()
    for ranks, some in terms.items():
        for one in some:
            one["optimizers"] = optimizers
        gradients = [one for one in some if one["kind"] != "all-gather"]
        sizes = {f"bucket {number}": one["whole"] for number, one in enumerate(gradients)}
        wraps = (f"{len(sizes)} bucket{'s' if len(sizes) > 1 else ''} of gradients",)
        made.append(Parallelism("DP", ranks, wraps, sizes, {"by": MEGATRON, "terms": some}))
    return made


def _optimizers() -> int:
    """How many distributed optimizers of Megatron-core's there are: each has a model's parameters gathered."""
    module = sys.modules.get("megatron.core.optimizer.distrib_optimizer")
    return sum(type(one) is module.DistributedOptimizer for one in gc.get_objects()) if module else 0


def _term(kind: str, ranks: Ranks, tensor: torch.Tensor, what: str) -> dict[str, Any]:
    """A term that a step has once, whatever the phase."""
    return {
        "ranks": ranks, "kind": kind, "phase": "", "repeated": False, "elements": tensor.numel(), "what": what,
        "calls": 1, "bytes": sent_by(kind, tensor.nbytes, len(ranks)), "again_bytes": 0,
        "modules": [], "same": {}, "width": 0, "whole": tensor.nbytes,
    }  # fmt: skip


def _stage(state: Any, ranks: Ranks, roots: list[torch.nn.Module], shapes: Shapes) -> Parallelism:
    """This rank's stage of Megatron-core's pipeline; of interleaved ones only that they are there."""
    index = ranks.index(dist.get_rank())
    options: dict[str, Any] = {"by": MEGATRON}
    name = f"stage {index} of {len(ranks)}"
    models = [root for root in roots if any(hasattr(part, "post_process") for part in root.modules())]
    if len(models) != 1:
        return Parallelism("PP", ranks, (f"{name}, interleaved",), {}, options)
    terms = []
    if index + 1 < len(ranks):
        outputs = shapes.outputs.setdefault(models[0], {})
        options["stages"] = [(ranks[index], ranks[index + 1], outputs)]
    inner: Any = next(part for part in models[0].modules() if hasattr(part, "post_process"))
    if getattr(inner, "share_embeddings_and_output_weights", False) and (inner.pre_process or inner.post_process):
        both = ranks_of(state.get_embedding_group())
        weight = inner.shared_embedding_or_output_weight()
        if len(both) > 1 and weight.requires_grad:
            terms = [_term("all-reduce", both, getattr(weight, "main_grad", weight), TIED)] if index == 0 else []
    return Parallelism("PP", ranks, (name,), {}, options | {"terms": terms})


def pipelines(shapes: Shapes) -> Iterator[Parallelism]:
    """The stages of torch.distributed.pipelining on this rank."""
    pipelining = sys.modules.get("torch.distributed.pipelining.stage")
    if pipelining is None:
        return
    by_group: dict[Ranks, list[Any]] = {}
    for one in gc.get_objects():
        if type(one) is pipelining.PipelineStage:
            by_group.setdefault(ranks_of(one.group or dist.GroupMember.WORLD), []).append(one)
    for ranks, some in by_group.items():
        names = tuple(f"stage {one.stage_index} of {one.num_stages}" for one in some)
        stages = []
        for one in some:
            place = one.stage_index_to_group_rank
            if not one.is_last and place[one.stage_index] != place[one.stage_index + 1]:
                outputs = shapes.outputs.setdefault(one.submod, {})
                stages.append((ranks[place[one.stage_index]], ranks[place[one.stage_index + 1]], outputs))
        yield Parallelism("PP", ranks, names, {}, {"by": "torch.distributed.pipelining", "stages": stages})


def deepspeeds(roots: Iterable[torch.nn.Module], shapes: Shapes) -> Iterator[Parallelism]:
    """This rank's stage of DeepSpeed's pipeline, and the replicas of it."""
    pipe: Any = sys.modules.get("deepspeed.runtime.pipe.module")
    for root in roots if pipe is not None else ():
        if not isinstance(root, pipe.PipelineModule):
            continue
        grid: Any = root.mpu()
        ranks, index = ranks_of(grid.get_pipe_parallel_group()), grid.get_stage_id()
        options: dict[str, Any] = {"by": "DeepSpeed"}
        if index + 1 < len(ranks):
            options["stages"] = [(ranks[index], ranks[index + 1], shapes.outputs.setdefault(root, {}))]
        if len(ranks) > 1:
            yield Parallelism("PP", ranks, (f"stage {index} of {len(ranks)}",), {}, options)
        replicas = ranks_of(grid.get_data_parallel_group())
        trained = [parameter for parameter in root.parameters() if parameter.requires_grad]
        if len(replicas) > 1 and trained:
            whole = torch.empty(sum(p.numel() for p in trained), dtype=trained[0].dtype, device="meta")
            term = _term("all-reduce", replicas, whole, "gradients, summed whole") | {"elements": 0, "calls": 0}
            yield Parallelism("DP", replicas, ("gradients",), {}, {"by": "DeepSpeed", "terms": [term]})


def with_terms(found: list[Parallelism], shapes: Shapes, first: int, vocabularies: Iterable[int]) -> list[Parallelism]:
    """The parallelisms with what their formulas say of the median step from step ``first`` on."""
    of_group = shapes.terms(first, vocabularies)
    told = []
    for one in found:
        options = dict(one.options)
        if one.kind in ("FSDP2", "HSDP"):
            options["runs"] = {unit: shapes.times(unit, first) for unit in one.wraps}
        terms = [*options.pop("terms", []), *of_group.pop((one.kind, one.ranks), [])]
        for sender, receiver, outputs in options.pop("stages", []):
            nbytes, elements = shapes.median(outputs, first)
            for ends, what in (((sender, receiver), ACTIVATIONS), ((receiver, sender), THEIR_GRADIENTS)):
                terms.append({
                    "ranks": ends, "kind": "send", "phase": "", "repeated": False, "elements": elements, "what": what,
                    "calls": 0, "bytes": nbytes, "again_bytes": 0, "modules": [], "same": {}, "width": 0,
                })  # fmt: skip
        told.append(replace(one, options=options | {"terms": terms}) if terms else replace(one, options=options))
    rest = [
        Parallelism(kind, ranks, ("attention" if kind == "CP" else "activations",), {}, {"by": "torch", "terms": terms})
        for (kind, ranks), terms in of_group.items()
    ]
    return told + rest
