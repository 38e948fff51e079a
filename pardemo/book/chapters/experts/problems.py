"""The problems of this chapter, and the way to each answer."""

import itertools

from pardemo.book.page.problems import problem
from pardemo.formulas import expert_parallel as formulas
from pardemo.formulas import memory
from pardemo.planner import hardware, rates
from pardemo.planner.layouts.configurations import shape_of


@problem()
def _as_wide_as_nine():
    """In DeepSeek-V3 a token goes to 8 of 256 experts of inner width 2,048, and to a shared one of the same width.
    Leave the router out. Which inner width would an ordinary MLP with a gate have, if it took as many operations for a
    token?"""
    shape = shape_of("deepseek-v3")
    shared = shape.experts.shared_ffn_hidden // shape.experts.ffn_hidden
    each, passed = shape.experts.ffn_hidden, shape.experts.top_k + shared
    flops = formulas.token_flops(shape.hidden, each, 0, shape.experts.top_k, shared)
    width = flops / formulas.token_flops(shape.hidden, 1, 0, 1)
    return width, f"""An MLP with a gate takes 6·h·width operations for a token, whether it is an expert or not. A token
        goes through {shape.experts.top_k} + {shared} experts, so an ordinary MLP takes as many with a width of
        {passed} · {each:,} = {width:,.0f}. This is the width that DeepSeek-V3 gives to the MLPs of its first
        {shape.experts.first_dense_layers} layers, so that every layer costs a token the same."""  # fmt: skip


@problem()
def _room_for_most():
    """A rank has 512 tokens, k = 2, and its router sends 320, 224, 160, 112, 80, 64, 40 and 24 rows to the eight
    experts. Which capacity factor does the rank need at least, so that no more than 5 % of its rows are dropped?"""
    load, tokens, chosen = (320, 224, 160, 112, 80, 64, 40, 24), 512, 2
    rows, even = tokens * chosen, formulas.capacity(tokens, chosen, len(load), 1.0)
    may = int(0.05 * rows)
    room = next(room for room in itertools.count(even) if formulas.dropped(load, room) <= may)
    kept, padded = rows - formulas.dropped(load, room), len(load) * room
    return room / even, f"""Of {rows:,} rows {may} may be dropped. Room for {load[1]} rows is enough for all experts but
        the first, and this one would drop {formulas.dropped(load, load[1])}. So it needs room for {load[0]} − {may} =
        {room}, and the even share is {rows:,}/{len(load)} = {even}: the factor is {room / even:.2f}. If the rows of
        every expert are padded to this room, {padded:,} rows are multiplied, and only {kept} of them are
        wanted."""  # fmt: skip


@problem("times")
def _four_nodes_or_one():
    """GPT-OSS 120B has E = 128 and k = 4. On H100s you may take e = 8, inside a node, where 360 GB/s are reached, or
    e = 32 on four nodes. Then a token is sent once to each other node that has any of its experts, over a card of 400
    Gbit/s for each GPU, of which 24 GB/s are reached. All choices are equally likely; count these links alone. How many
    times as long does an exchange take with e = 32?"""
    experts = shape_of("gpt-oss-120b").experts
    rows = formulas.one_way_bytes(1, 1, experts.top_k, 8, 1)
    met = formulas.other_nodes(experts.count, experts.top_k, 4)
    slower = rates.inside(hardware.gpu("H100")) / rates.between(hardware.link("infiniband-400g"))
    ratio = slower * met / rows
    return ratio, f"""With e = 8 each token leaves its rank as ⅞ · 4 = {rows:g} rows, at 360 GB/s. With e = 32 another
        node has none of its experts in C(96, 4)/C(128, 4) = {1 - met / 3:.3f} of all cases, so the token goes to 3 ·
        {met / 3:.3f} = {met:.2f} nodes, at 24 GB/s. Fewer rows travel, but their link is {slower:g} times as slow, and
        the exchange takes {ratio:.2f} times as long."""  # fmt: skip


@problem()
def _wide_enough():
    """A layer's experts lie on two nodes of H100s (636 TFLOP/s each), and each GPU has a card of 400 Gbit/s, of which
    24 GB/s are reached. Loads are even, and a token travels in bf16 as k rows, one to each expert. Count the cards
    alone. From which inner width of an expert on do the experts' matrix multiplications in a forward pass take at least
    as long as the two exchanges?"""
    rate, card = rates.matrix(hardware.gpu("H100")), rates.between(hardware.link("infiniband-400g"))
    share, sent = formulas.one_way_bytes(1, 1, 1, 2, 1), 2 * formulas.one_way_bytes(1, 1, 1, 2, 2)
    flops = formulas.token_flops(1, 1, 0, 1)
    width = sent / card / (flops / rate)
    return width, f"""Of the rows {share:g} leave the node. So for each row a GPU sends, there and back, 2 · {share:g} ·
        2h = {sent:g}·h bytes, and it computes {flops}·h·width operations. T, k and h are the same in both, so more
        tokens do not help: the width has to be {sent:g}/{flops} · {rate / 1e12:.0f}·10¹²/(24·10⁹) = {width:,.0f}.
        DeepSeek-V3's experts have 2,048, which is one reason why it sends a token once to each node."""  # fmt: skip


@problem("stages")
def _stages_that_fit():
    """GPT-OSS 120B has 114.7 billion parameters in the experts of its 36 layers. On 64 GPUs, with t = 1 and e = 8,
    weights and gradients of a rank's experts take 4 bytes a parameter. Adam's 12 are cut over the ranks that have the
    same experts. How many equal pipeline stages (1, 2, 4 …) does it take at least to have no more than 40 GB of both on
    a GPU?"""
    shape, gpus, e, room = shape_of("gpt-oss-120b"), 64, 8, 40e9
    params = shape.layers * shape.expert_params

    def kept(stages: int) -> dict[str, float]:
        return memory.model_states(params // (stages * e), gpus // (stages * e), 1)

    least = next(p for p in range(1, gpus // e + 1) if gpus % (p * e) == 0 and sum(kept(p).values()) <= room)
    adam = kept(1)["optimizer states"]
    small, large = (sum(kept(p).values()) - adam for p in (least, least // 2))
    return least, f"""With p stages a rank has {params / 1e9:.1f}/(8p) billion parameters of experts, and d/e = 8/p
        ranks have the same ones. So Adam's bytes are cut by all 64 GPUs whatever p is, {adam / 1e9:.1f} GB, and
        {(room - adam) / 1e9:.1f} GB are left for {large * least / 2 / 1e9:.1f}/p. Two stages have {large / 1e9:.1f} GB
        of these and {least} have {small / 1e9:.1f} GB, so it takes {least}, as in NVIDIA's layout for the
        H100."""  # fmt: skip
