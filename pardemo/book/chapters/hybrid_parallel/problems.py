"""The problems of this chapter, and the way to each answer."""

import math

from pardemo.book.page.problems import problem
from pardemo.formulas import communication, pipeline, tensor_parallel
from pardemo.planner import hardware
from pardemo.planner.layouts import procedure
from pardemo.planner.layouts.configurations import find, of
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.procedure import job_of


@problem("times")
def _tensor_over_pipeline():
    """A GPU has 10 layers of a model with t = 4 and p = 8, in a stage in the middle. Nothing is recomputed. For each
    micro-batch, how many times as many bytes does it send to its tensor group as to its neighbours in the pipeline?"""
    whole = 2 * 4096 * 8192
    inside = 10 * tensor_parallel.block() * tensor_parallel.phi(1, 4096, 8192, 4, element_bytes=2)
    onward, _ = pipeline.boundary_bytes(1, 8, 1, whole)
    return inside / onward, f"""φ is ¾·A, so 8φ in each of 10 layers are {inside / whole:g}·A. To its neighbours in the
        pipeline the GPU sends an activation onward and a gradient back, {onward / whole:g}·A. That is why the tensor
        group stays inside a node: it gets {inside / onward:g} times as much."""  # fmt: skip


@problem("s")
def _gradients_of_replicas():
    """256 H100s train Llama 3 70B (70.6 billion parameters, cut evenly) with t = 8 and p = 4. Gradients are bf16, and
    each GPU has a network card of 400 Gbit/s of its own. Nothing hides; leave latency out. How long does the all-reduce
    of the replicas' gradients take?"""
    params, ranks = of(find("llama3-70b")).params, 256
    t, p = 8, 4
    d = ranks // (t * p)
    gradients = 2 * params / (t * p)
    sent = communication.ring_all_reduce(gradients, d).sent
    seconds = sent / hardware.link("infiniband-400g")
    return seconds, f"""d is {ranks}/(t·p) = {d}, and a GPU has {params / (t * p) / 1e9:.2f} billion parameters, whose
        gradients are {gradients / 1e9:.2f} GB. It sends 2(d−1)/d of them, {sent / 1e9:.2f} GB, which takes
        {seconds:.3f} s once a step."""  # fmt: skip


@problem("days")
def _days_of_training():
    """2,048 H100s of 989 TFLOP/s train Llama 3 70B: 70.6 billion parameters, l = 80, h = 8192, s = 8192. They reach an
    MFU of 40 %. How many days does it take to train on 15·10¹² tokens?"""
    shape, tokens = of(find("llama3-70b")), 15e12
    of_weights, of_attention = 6 * shape.params, 12 * shape.layers * shape.hidden * 8192
    rate = 0.4 * 2048 * hardware.gpu("H100").flops
    days = (of_weights + of_attention) * tokens / rate / 86_400
    return days, f"""A token takes 6Ψ = {of_weights / 1e9:.0f} billion operations and 12·l·h·s =
        {of_attention / 1e9:.0f} billion for attention. The GPUs do 0.4 · 2,048 · 989 TFLOP/s = {rate / 1e15:.0f}
        PFLOP/s for the model. All tokens take {(of_weights + of_attention) * tokens / rate / 1e6:.2f} million seconds,
        which are {days:.1f} days."""  # fmt: skip


@problem("micro-batches")
def _fewer_tensor_ranks():
    """64 H100s train a model with h = 8192 and d = 2. Each has F = 494.5 TFLOP/s and B = 450 GB/s on NVLink. You may
    take t = 8 and p = 4, or t = 4 and p = 8. By the rule tensor parallelism adds (t − 1)·F/(4.5·h·B), and the bubble (p
    − 1)/m. Leave messages between stages out. From how many micro-batches on do eight stages add less?"""
    job = job_of("llama3-70b", "H100", 64, 400)
    wide, narrow = (procedure.adds(job, Layout(tp=t, pp=p, dp=2))["tensor parallel"] for t, p in ((8, 4), (4, 8)))
    more = pipeline.bubble_of_ideal(8, 1) - pipeline.bubble_of_ideal(4, 1)
    needed = math.floor(more / (wide - narrow)) + 1
    return needed, f"""Tensor parallelism adds {100 * wide:.1f} % with t = 8 and {100 * narrow:.1f} % with t = 4,
        {100 * (wide - narrow):.1f} points less. The bubble grows from 3/m to 7/m, which is {more:g}/m more. The cut
        into more stages adds less where {more:g}/m is below {wide - narrow:.4f}, so from m = {needed}
        on."""  # fmt: skip


@problem("%")
def _hsdp_between_nodes():
    """Eight nodes of eight H100s (F = 494.5 TFLOP/s, NVLink 450 GB/s) train Llama 3 8B in 8 micro-batches of 8,192
    tokens on each GPU. A node has one card of 50 GB/s, and the rule takes half of that for B. How many per cent of the
    multiplications' time does HSDP add by the rule, if ZeRO-3 adds x = F/(B·T) − 1 and HSDP ⅔·x/m?"""
    job, m = job_of("llama3-8b", "H100", 64, 50, sequence=8192), 8
    everywhere, inside = (
        procedure.adds(job, Layout(dp=64, sharding="zero3", shard_group=group, accumulation=m))["data parallel"]
        for group in (0, 8)
    )
    ratio = procedure.rate(job) / procedure.link(job, 64)
    return 100 * inside, f"""Between nodes F/B is {ratio:,.0f} tokens, so with 8,192 tokens x is {everywhere:.2f}:
        ZeRO-3 over all GPUs would add {100 * everywhere:.0f} %. Inside a node F/B is only
        {procedure.rate(job) / procedure.link(job, 8):,.0f} tokens, and HSDP's gathers hide. What it sends between nodes
        it sends once a step: ⅔ · {everywhere:.2f} / {m} is {100 * inside:.1f} %."""  # fmt: skip
