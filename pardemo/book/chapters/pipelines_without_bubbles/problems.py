"""The problems of this chapter, and the way to each answer."""

from pardemo.book.page.problems import problem
from pardemo.formulas import pipeline


@problem("micro-batches")
def _as_idle_as_zb_v():
    """Eight stages, and τF = τI = τW. ZB-V runs 16 micro-batches. How many does 1F1B need to be idle for no larger
    share of the total time?"""
    bubble = pipeline.idle("zb_v", 8, 16, 1, 2) / 3
    share, longer = bubble / (16 + bubble), pipeline.idle("one_f_one_b", 8, 16, 1, 2) / 3
    needed = pipeline.micro_batches_for(8, share)
    return needed, f"""ZB-V's bubble is (p−1)/6 = {bubble:.3g} micro-batches long, {100 * share:.1f} % of the total
        time. 1F1B's is p−1 = {longer:g} micro-batches, {longer / bubble:g} times as long. It is the same share if the
        work is {longer / bubble:g} times as long, too: {longer / bubble:g} · 16 = {needed}
        micro-batches."""  # fmt: skip


@problem("ms")
def _short_weights():
    """Eight stages run ZB-H1 with many micro-batches. A stage's forward pass takes τF = 40 ms, the gradient of its
    input τI = 50 ms, and those of its weights, since there is much attention, only τW = 30 ms. How long is a rank idle
    in a step?"""
    idle = 1e3 * pipeline.idle("zb_h1", 8, 32, 0.04, 0.08, 0.03)
    idle_ms = 1e3 * pipeline.idle("one_f_one_b", 8, 32, 0.04, 0.08)
    return idle, f"""It is (p−1)·(τF + τI − τW) = 7 · (40 + 50 − 30) ms = {idle:g} ms. 1F1B would be idle for 7 · 120 =
        {idle_ms:g} ms: short weights' gradients fill half of that, and not two thirds."""  # fmt: skip


@problem("GB")
def _held_by_zb_h1():
    """Four stages run ZB-H1. A micro-batch leaves 2.5 GB in a stage until its I, and with PyTorch's autograd 14/9 of
    that from then until its W. The last rank has put off three W when it computes the fourth I. How much do these four
    micro-batches keep then?"""
    late = pipeline.in_flight("zb_h1", 3, 4, 16)
    held = 2.5 * late * 14 / 9
    return held, f"""Behind its I each of the {late} micro-batches keeps 14/9 of 2.5 GB = {held / late:.2f} GB, so
        together {held:.1f} GB. Without the surplus of autograd it would be p · 2.5 = {2.5 * late:g} GB, what 1F1B's
        first rank holds."""  # fmt: skip


@problem("ms")
def _last_rank_of_dual_pipe_v():
    """DualPipeV on 8 ranks puts each W off at the end. A chunk takes F = I = W = 20 ms, and a forward and a whole
    backward that run together take F&B = 54 ms. How long is the last rank idle in a step?"""
    idle = 1e3 * pipeline.dual_pipe_v_idle(8, 0.02, 0.04, 0.02, 0.054)
    return idle, f"""(p−1)·(F&B + B − 3W) = 7 · (54 + 40 − 60) ms = {idle:g} ms. Nothing else is saved at I = F. Run one
        after the other, the bubble would be 7 · 20 = 140 ms; but each of the pairs saves 6 ms."""  # fmt: skip


@problem("micro-batches")
def _when_a_pair_pays():
    """A pair of DualPipeV saves 4 % of its time, on p = 8 ranks, with τF = τI = τW. From how many micro-batches on is a
    step shorter than ZB-V's?"""
    ranks, saved = 8, 0.04
    together, apart = (pipeline.dual_pipe_v_idle(ranks, 1, 2, 1, pair) for pair in (3 * (1 - saved), None))
    first = next(m for m in range(2 * ranks, 1000) if 3 * saved * (2 * m - 2 * ranks - 1) > together - apart)
    return first, f"""In forward passes of a chunk, the last rank is idle for (p−1)·(F&B + B − 3W) = {together:.2f}, and
        in ZB-V for {apart:g}: {together - apart:.2f} more. It has 2m − 2p − 1 pairs, and each saves {3 * saved:.2f}. So
        2m − 17 has to be more than {(together - apart) / (3 * saved):.1f}: m = {first}."""  # fmt: skip
