"""The problems of this chapter, and the way to each answer."""

from pardemo.book.page.problems import problem
from pardemo.formulas import communication, pipeline, tensor_parallel
from pardemo.planner import hardware, rates
from pardemo.planner.layouts.configurations import shape_of


@problem("times")
def _tensor_over_pipeline():
    """A GPU has 10 layers of a model with t = 4 and p = 8, in a stage in the middle. Nothing is recomputed. For each
    micro-batch, how many times as many bytes does it send to its tensor group as to its neighbours in the pipeline?"""
    size = 2 * 4096 * 8192
    inside = 10 * tensor_parallel.block() * tensor_parallel.phi(1, 4096, 8192, 4, element_bytes=2)
    onward, _ = pipeline.boundary_bytes(1, 8, 1, size)
    return inside / onward, f"""φ is ¾·A, so 8φ in each of 10 layers are {inside / size:g}·A. To its neighbours in the
        pipeline the GPU sends an activation onward and a gradient back, {onward / size:g}·A. That is why the tensor
        group stays inside a node: it gets {inside / onward:g} times as much."""  # fmt: skip


@problem("s")
def _gradients_of_replicas():
    """256 H100s train Llama 3 70B (70.6 billion parameters, cut evenly) with t = 8 and p = 4. Gradients are bf16, and
    each GPU has a network card of 400 Gbit/s of its own, of which rings over many nodes reach 0.48. Nothing hides;
    leave latency out. How long does the all-reduce of the replicas' gradients take?"""
    params, ranks = shape_of("llama3-70b").params, 256
    t, p = 8, 4
    d = ranks // (t * p)
    gradients = 2 * params / (t * p)
    sent = communication.ring_all_reduce(gradients, d).sent
    seconds = sent / rates.between(hardware.link("infiniband-400g"))
    return seconds, f"""d is {ranks}/(t·p) = {d}, and a GPU has {params / (t * p) / 1e9:.2f} billion parameters, whose
        gradients are {gradients / 1e9:.2f} GB. It sends 2(d−1)/d of them, {sent / 1e9:.2f} GB, at
        0.48 · 50 = 24 GB/s: {seconds:.3f} s once a step."""  # fmt: skip


@problem("days")
def _days_of_training():
    """2,048 H100s of 989 TFLOP/s train Llama 3 70B: 70.6 billion parameters, l = 80, h = 8192, s = 8192. They reach an
    MFU of 40 %. How many days does it take to train on 15·10¹² tokens?"""
    shape, tokens = shape_of("llama3-70b"), 15e12
    of_weights, of_attention = 6 * shape.params, 12 * shape.layers * shape.hidden * 8192
    rate = 0.4 * 2048 * hardware.gpu("H100").flops
    days = (of_weights + of_attention) * tokens / rate / 86_400
    return days, f"""A token takes 6Ψ = {of_weights / 1e9:.0f} billion operations and 12·l·h·s =
        {of_attention / 1e9:.0f} billion for attention. The GPUs do 0.4 · 2,048 · 989 TFLOP/s = {rate / 1e15:.0f}
        PFLOP/s for the model. All tokens take {(of_weights + of_attention) * tokens / rate / 1e6:.2f} million seconds,
        which are {days:.1f} days."""  # fmt: skip


@problem("tokens")
def _tensor_over_data():
    """A model's layers have 12 · h² weights, h = 5,120. It is trained with t = 4 and d = 4, activations and gradients
    both in bf16, nothing recomputed. From how many tokens of a replica in a step on does a rank send more to its tensor
    group than to its data group?"""
    width, t, d = 5120, 4, 4
    layer = 12 * width**2
    a_token = tensor_parallel.block() * tensor_parallel.phi(1, 1, width, t, element_bytes=2)
    tokens = communication.ring_all_reduce(2 * layer / t, d).sent / a_token
    return tokens, f"""For a token a rank sends 8φ in each layer, 8 · ¾ · h numbers. Of a layer's gradients it has
        12 · h²/4 and sends 2(d−1)/d = 1.5 of them, 4.5 · h². Both are equal at 4.5 · h/6 = {tokens:,.0f} tokens. With
        many replicas it would be 3h/(t−1) = {3 * width / (t - 1):,.0f}."""  # fmt: skip


@problem("%")
def _from_hfu():
    """Somebody reports 55 % of the peak for a model of 13 billion parameters with l = 40, h = 5,120 and s = 4,096. All
    layers were recomputed, and the report counts them. What is the MFU?"""
    forward = 40 * tensor_parallel.flops_forward(1, 4096, 5120) / 4096
    needed, counted = 3 * forward, 4 * forward
    mfu = 55 * needed / counted
    return mfu, f"""A pass forward takes l · (24h² + 4s·h) = {forward / 1e9:.1f} billion operations for each token, the
        backward pass twice that: {needed / 1e9:.0f} billion in all. A second forward pass makes {counted / 1e9:.0f}
        billion of them, 4/3. So the MFU is 55 · 3/4 = {mfu:.2f} %."""  # fmt: skip
