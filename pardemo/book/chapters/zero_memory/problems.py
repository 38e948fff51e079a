"""The problems of this chapter, and the way to each answer."""

import itertools

from pardemo.book.page.problems import problem
from pardemo.formulas import memory
from pardemo.planner.layouts.configurations import shape_of


@problem("GB")
def _kept_more_than_once():
    """Eight GPUs train Llama 3 8B (8.03 billion parameters) by plain data parallelism, with Adam in mixed precision.
    How many GB of model states would ZeRO-3 save on the eight GPUs together?"""
    params = shape_of("llama3-8b").params
    replica = memory.model_states_bytes(params, 8, 0)
    saved = 8 * (replica - memory.model_states_bytes(params, 8, 3))
    return saved / 1e9, f"""A replica has 16 bytes a parameter, {replica / 1e9:.0f} GB, and data parallelism keeps eight
        of them. ZeRO-3 keeps each byte once on the eight GPUs together. So it saves seven replicas, {saved / 1e9:.0f}
        GB."""  # fmt: skip


@problem("GPUs")
def _gpus_for_zero_2():
    """The activations leave 28 GB of each GPU to the model states of Llama 3 8B (8.03 billion parameters, K = 12). How
    many GPUs does ZeRO-2 need at least?"""
    params, room = shape_of("llama3-8b").params, 28e9
    needed = next(n for n in itertools.count(1) if memory.model_states_bytes(params, n, 2) <= room)
    kept = memory.model_states(params, needed, 2)["parameters"]
    cut = memory.model_states_bytes(params, 1, 2) - kept
    return needed, f"""The whole parameters take 2Ψ = {kept / 1e9:.2f} GB on each GPU, which leaves
        {(room - kept) / 1e9:.2f} GB. Gradients and optimizer states have (2 + K)Ψ = {cut / 1e9:.1f} GB, and an N-th of
        them must fit there: N is at least {cut / (room - kept):.2f}, more than a node of eight has. It takes {needed}
        GPUs."""  # fmt: skip


@problem("GB")
def _eight_bits_less():
    """Eight GPUs train Llama 3 8B (8.03 billion parameters) under ZeRO-2, and you want more room for activations. How
    many GB does each GPU save if Adam's two means are kept in 8 bits, so that K is 6 instead of 12?"""
    params, n = shape_of("llama3-8b").params, 8
    usual, small = (
        memory.model_states_bytes(params, n, 2, memory.STATES[name])
        for name in ("Adam, mixed precision", "Adam, 8-bit states")
    )
    return (usual - small) / 1e9, f"""With K = 12 a GPU keeps 2Ψ + 14Ψ/8 = {usual / 1e9:.1f} GB, and with K = 6 it keeps
        2Ψ + 8Ψ/8 = {small / 1e9:.1f} GB. Only what ZeRO has cut gets smaller, so 6Ψ/8 are saved:
        {(usual - small) / 1e9:.2f} GB."""  # fmt: skip


@problem("GB")
def _with_tensor_ranks():
    """64 GPUs train Llama 3 70B (70.6 billion parameters) under ZeRO-1 with t = 8 and K = 12. How many GB of model
    states does a GPU keep, if every parameter is cut by t?"""
    params, gpus, t = shape_of("llama3-70b").params, 64, 8
    states = memory.model_states(params // t, gpus // t, 1)
    total, optimizer = sum(states.values()), states["optimizer states"]
    return total / 1e9, f"""A rank has an eighth of each layer, {params / t / 1e9:.2f} billion parameters, and their 4
        bytes of parameter and gradient are {(total - optimizer) / 1e9:.1f} GB. Only 64/8 = {gpus // t} ranks hold the
        same parameters, so Adam's 12 bytes are cut by {gpus // t} and not by {gpus}: {optimizer / 1e9:.1f} GB. Together
        they are {total / 1e9:.1f} GB."""  # fmt: skip


@problem("billion")
def _larger_of_two_sums():
    """Under ZeRO-3 on eight GPUs, 78 GB of each may be filled, and activations take 4 GB. Leave gathered layers out,
    but not the peak in Adam's step. How many billion parameters can a model have (K = 12)?"""
    room, activations, n = 78e9, 4e9, 8
    beside = memory.largest_model(room - activations, n, 3)
    peak = memory.largest_model(room, n, 3, states=memory.STATES["Adam, mixed precision, fp32 gradients"])
    most = min(beside, peak)
    return most / 1e9, f"""The states, 16Ψ/8, have to fit beside the activations: Ψ is at most {beside / 1e9:.1f}
        billion. In Adam's step the activations are gone, but the gradients are fp32, and the step holds 18Ψ/8. A GPU
        has to hold the larger of the two sums. With so few activations that is the step's, and Ψ is at most
        {most / 1e9:.1f} billion."""  # fmt: skip
