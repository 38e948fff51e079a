"""The problems of this chapter, and the way to each answer."""

from pardemo.book.page.problems import problem
from pardemo.formulas import communication
from pardemo.meters.timeline import Span, covered_s, overlap_s
from pardemo.planner import hardware


def _spans(kind: str, *bars: tuple[float, float]) -> list[Span]:
    return [Span(0, kind, "", begin, end) for begin, end in bars]


@problem("ms")
def _own_time():
    """A forward pass is a bar of 30 ms. Directly inside it are two layers, of 10 and 13 ms, and inside of each is a
    matrix multiplication of 8 ms. What is the forward pass's own time?"""
    left = 30 - covered_s(_spans("inside", (2, 12), (14, 27)))
    return left, f"""Of the 30 ms the two layers take 10 and 13, and what is inside of them is theirs: {left:g} ms are
        left. The multiplications do not come off once more."""  # fmt: skip


@problem("ms")
def _exposed():
    """A thread computes from 0 to 60 ms. One all-reduce is open from 20 to 50 ms, another from 40 to 75. How much
    communication is exposed?"""
    sums, work = _spans("sum", (20, 50), (40, 75)), _spans("work", (0, 60))
    exposed = covered_s(sums) - overlap_s(sums + work, "sum", "work")
    return exposed, f"""Together the all-reduces are open from 20 to 75, {covered_s(sums):g} ms. Until 60 the thread
        computes, which hides {covered_s(sums) - exposed:g} ms: {exposed:g} ms are exposed."""  # fmt: skip


@problem("ms")
def _last_bucket():
    """DDP on 16 GPUs sums gradients in buckets of 25 MB, on links of 5 GB/s. All but the last bucket hide. How long
    does the trace show the thread waiting at the end of the backward pass?"""
    nbytes = 25e6
    milliseconds = 1e3 * communication.cluster_seconds("ring", nbytes, 16, 5e9)
    return milliseconds, f"""The last bucket is full when the backward pass is over, so all of it is exposed: 2·15/16 of
        {nbytes / 1e6:g} MB at 5 GB/s, which is {milliseconds:.3g} ms."""  # fmt: skip


@problem("ms")
def _shortest_bar():
    """The same all-reduce has bars of 92, 95, 11 and 90 ms on ranks 0 to 3, and all of them end together. How long did
    rank 1 wait for another rank?"""
    bars = {0: 92.0, 1: 95.0, 2: 11.0, 3: 90.0}
    network = min(bars.values())
    waited = covered_s(_spans("sum", (0, bars[1]))) - network
    return waited, f"""All bars end together, so the rank with the shortest one came last, and its {network:g} ms are
        what the sum takes. Rank 1 waited the other {waited:g} ms, for rank 2, and the network is not to
        blame."""  # fmt: skip


@problem("%")
def _share_of_the_peak():
    """In a trace of an H100 the kernel that multiplies two 8192 × 8192 matrices in bf16 takes 1.6 ms. What per cent of
    the data sheet's rate does it reach?"""
    flops = 2 * 8192**3
    share = 100 * flops / 1.6e-3 / hardware.gpu("H100").flops
    return share, f"""To multiply n × n matrices takes 2n³ = {flops / 1e12:.2f}·10¹² operations. In 1.6 ms that is
        {flops / 1.6e-3 / 1e12:.0f} TFLOP/s, {share:.0f} % of the data sheet's
        {hardware.gpu('H100').flops / 1e12:g}."""  # fmt: skip
