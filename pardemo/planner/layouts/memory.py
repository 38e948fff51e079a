"""Predicts a GPU's bytes in a step: what a rank of the fullest pipeline stage holds, line by line."""

from pardemo.planner.estimate import Memory
from pardemo.planner.layouts.fine_tune_memory import predict_peak
from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.per_rank import Owned, kept_bytes, owned_layer, owned_params, owned_trained_params
from pardemo.planner.layouts.step import stage_layers

LINES = ("parameters", "gradients", "optimizer states", "gathered parameters", "activations", "logits", "program")


def predict_memory(job: Job, layout: Layout) -> Memory:
    """Predicts the bytes of a rank of the fullest stage; of a fine-tune under Transformers' Trainer its engine's."""
    if job.program.engine:
        return predict_peak(job, layout)
    split = stage_layers(job, layout)
    equal_stages = len(set(split)) == 1  # then it is the first or the last one
    candidates = {0, layout.pp - 1} if equal_stages else range(layout.pp)
    # of a token and a layer, the same on all stages
    kept_of_a_token = kept_bytes(job, layout), _recomputed_bytes(job, layout)
    return max(
        (Memory(_stage(job, layout, split, index, *kept_of_a_token), stage=index) for index in candidates),
        key=lambda stage: stage.peak_bytes,
    )


def _recomputed_bytes(job: Job, layout: Layout) -> float:
    """Returns the bytes of each token that the layer in its backward pass has beside what it kept."""
    key = "recomputed", layout.tp, layout.cp, layout.sequence_parallel, layout.recompute, layout.recomputed_modules
    if key not in job.cache:
        nbytes = 0.0
        if layout.recompute == "full":
            nbytes = kept_bytes(job, layout.but(recompute="none"))
        elif layout.recomputed_modules:
            nbytes = kept_bytes(job, layout.but(recompute="none", recomputed_modules=())) - kept_bytes(job, layout)
        job.cache[key] = nbytes
    return job.cache[key]


def _stage(job: Job, layout: Layout, split: list[int], index: int, kept: float, recomputed: float) -> dict[str, float]:
    shape, program = job.shape, job.program
    owned = owned_params(job, layout, split, index)
    shard = owned.sharded(layout)
    updated, updated_shard = owned.total, shard
    if job.frozen:  # adapters come to the model's own weights
        trained = owned_trained_params(job, layout, split, index)
        updated, updated_shard = trained.total, trained.sharded(layout)
        owned, shard = Owned(owned.dense + trained.dense, owned.experts), shard + updated_shard
    stage = layout.zero_stage
    tokens = layout.micro_batch * job.sequence / layout.cp
    micro_batches = in_flight(layout, index)
    gradient_bytes = program.gradient_bytes + program.gradient_copy_bytes
    lines = {
        "parameters": program.weight_bytes * (shard if stage == 3 else owned.total),
        "gradients": gradient_bytes * (updated_shard if stage >= 2 else updated),
        "optimizer states": program.state_bytes * (updated_shard if stage >= 1 else updated),
        "activations": micro_batches * max(0, split[index] - layout.offloaded_layers) * tokens * kept,
        "program": program.program_bytes,
    }
    if stage >= 2 and program.bucketed_gradients:  # beside those that are kept
        least_gradients = 2 * owned_layer(shape, layout).total if stage == 3 else 0.0
        lines["gradients"] += program.gradient_bytes * min(max(program.bucketed_gradients, least_gradients), updated)
    if stage == 3 and layout.pp == 1:  # the layer that computes and the next, or what else is gathered ahead
        layer = owned_layer(shape, layout)
        gathered = min(owned.total, layer.total + max(layer.total, program.bucketed_gradients / 2))
        lines["gathered parameters"] = 2 * gathered * (1 - layer.sharded(layout) / layer.total)
    elif stage == 3:  # a pipeline's stage stays whole over a step, and so do its gradients
        lines["gathered parameters"] = 2 * (owned.total - shard)
        lines["gradients"] = program.gradient_bytes * updated
    if layout.tp > 1:
        lines["activations"] += tokens * program.gathered_input_bytes * shape.hidden
    lines["activations"] += tokens * recomputed
    if index == 0:
        lines["activations"] += (
            micro_batches * tokens * 2 * shape.hidden / (layout.tp if layout.sequence_parallel else 1)
        )
    if index == layout.pp - 1:
        lines["logits"] = tokens * shape.vocabulary / layout.tp * program.logit_bytes
    return lines


def in_flight(layout: Layout, stage: int) -> float:
    """Returns the most micro-batches whose activations a stage holds.

    1F1B: as many as there are stages from it on; interleaved (p − 1)/(p·v) more (Korthikanti et al. 2022, 4.2.3);
    ZB-H1: on every stage as many as on the first.
    """
    p, m = layout.pp, layout.accumulation
    if layout.chunks > 1:
        return min(m, p * (1 + (p - 1) / (p * layout.chunks)) - stage / layout.chunks)
    return min(m, p if layout.schedule == "zb-h1" else p - stage)
