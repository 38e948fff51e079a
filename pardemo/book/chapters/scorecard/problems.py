"""The problems of this chapter, and the way to each answer."""

from pardemo.book.chapters.scorecard import thresholds
from pardemo.book.page.problems import problem
from pardemo.formulas import pipeline
from pardemo.planner import hardware, rates
from pardemo.planner.layouts.configurations import shape_of

_A800, _H100 = hardware.gpu("A800-80GB"), hardware.gpu("H100")
_BAICHUAN = shape_of("baichuan2-13b")


@problem("billion")
def _on_one_node():
    """An A800 has 85.2 GB, of which 8 % stay free. Up to how many parameters do eight of them in one node hold the
    model states under ZeRO-1, at their peak in Adam's step and with nothing else in memory?"""
    largest = thresholds.states(_A800, 8, 1) / 1e9
    return largest, f"""92 % of {_A800.memory_bytes / 1e9:.1f} GB are {0.92 * _A800.memory_bytes / 1e9:.1f} GB. ZeRO-1
        keeps 2 bytes of parameter, 2 of gradient and 12/8 of Adam's states, and the step adds 6/8 for the sum and its
        fp32 copy: 6.25 bytes in all, so the GPUs hold {largest:.2f} billion parameters. Baichuan2-13B's
        {_BAICHUAN.params / 1e9:.1f} billion are above it."""  # fmt: skip


@problem("tokens")
def _slower_gpu():
    """An A800 reaches F = 271.2 TFLOP/s, and B = 160 GB/s inside a node. From how many tokens of a
    micro-batch on do ZeRO-3's gathers hide inside the node?"""
    tokens = thresholds.gathered(_A800, 8)
    of_h100 = thresholds.gathered(_H100, 8)
    return tokens, f"""T = F/B = {thresholds.rate(_A800) / 1e12:.1f} · 10¹²/({rates.inside(_A800) / 1e9:g} · 10⁹) =
        {tokens:,.0f} tokens. An H100 needs {of_h100:,.0f}: it computes
        {thresholds.rate(_H100) / thresholds.rate(_A800):.2f} times as fast, and its NVLink is
        {_H100.link_bytes_per_s / _A800.link_bytes_per_s:g} times as quick."""  # fmt: skip


@problem("%")
def _baichuan_cut():
    """Baichuan2-13B has h = 5,120. You cut its layers over t = 8 A800s of a node (F = 271.2 TFLOP/s, B = 160 GB/s), and
    no all-reduce hides. By the table's formula, how much does that add to the time of the matrix multiplications?"""
    adds = 100 * thresholds.tensor(_A800, _BAICHUAN.hidden)
    return adds, f"""(t − 1) · F/(4.5 · h · B) is 7 · {thresholds.rate(_A800) / 1e12:.1f} · 10¹²/(4.5 ·
        {_BAICHUAN.hidden:,} · {rates.inside(_A800) / 1e9:g} · 10⁹), {adds:.1f} %. To add 10 % or less the model
        would need h = {thresholds.wide(_A800):,.0f}. So Baichuan2-13B is too narrow for t = 8: shards are cheaper while
        they fit."""  # fmt: skip


@problem("micro-batches")
def _micro_batches():
    """A pipeline of p = 16 stages has v = 4 chunks on each rank and may wait at most 10 % of the time. An interleaved
    schedule needs m to be a multiple of p. What is the least m that you can take?"""
    least = pipeline.micro_batches_for(16, 0.1, 4)
    taken = -(-least // 16) * 16
    waits = 100 * pipeline.bubble_of_total(16, taken, 4)
    return taken, f"""9 · (p − 1)/v = 9 · 15/4 = {9 * 15 / 4:g}, so {least} micro-batches are enough. Chunks ask for a
        multiple of p, and the next one is {taken}. There the pipeline waits {waits:.1f} % of the time. Without chunks
        it would take {pipeline.micro_batches_for(16, 0.1)} micro-batches."""  # fmt: skip


@problem("tokens")
def _shards_or_cut():
    """H100s (F = 635.6 TFLOP/s) on several nodes train a model with h = 8,192. Inside a node B is 360 GB/s, and tensor
    parallelism over its t = 8 GPUs hides nothing; between nodes B is 192 GB/s, and ZeRO-3 hides what it can. At how
    many tokens of a micro-batch on a GPU do both add the same time?"""
    adds = thresholds.tensor(_H100, 8192)
    hides = thresholds.gathered(_H100, 16)
    tokens = hides / (1 + adds)
    return tokens, f"""Tensor parallelism inside the node adds (t − 1) · F/(4.5 · h · B) = {100 * adds:.1f} %, whatever
        T is. ZeRO-3's gathers take F/(B · T) of the multiplications, and what is above 1 is added. F/B is {hides:,.1f}
        tokens, so both add as much where {hides:,.1f}/T = {1 + adds:.4f}, at T = {tokens:,.0f}. With more tokens on a
        GPU take the shards, with fewer cut the layers."""  # fmt: skip
