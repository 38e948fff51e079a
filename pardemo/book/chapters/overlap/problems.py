"""The problems of this chapter, and the way to each answer."""

from pardemo.book.page.problems import problem
from pardemo.formulas import communication, overlap
from pardemo.planner import hardware, rates


@problem("ms")
def _last_bucket():
    """The gradients of 7 billion parameters, in bf16, are all-reduced in 20 equal buckets over 64 GPUs at 25 GB/s
    beside a backward pass of 1 s. How much of the communication is exposed?"""
    sends = [communication.cluster_seconds("ring", 2 * 7e9 / 20, 64, 25e9)] * 20
    step = overlap.computed_then_sent_s([1.0 / 20] * 20, sends)
    return 1e3 * (step - 1.0), f"""A bucket has 0.7 GB, and its ring sends 2(N−1)/N of it: {1e3 * sends[0]:.1f} ms at
        25 GB/s. Its gradients take {1e3 / 20:g} ms to compute, which is shorter, so each message waits for the one
        before it. The first one starts at {1e3 / 20:g} ms, the last one ends 20 · {1e3 * sends[0]:.1f} ms later,
        {1e3 * (step - 1.0):.1f} ms after the pass."""  # fmt: skip


@problem("pieces")
def _pieces():
    """A matrix multiplication takes 2 ms, the message with its result 1 ms, and each message costs 20 µs to start. In
    how many equal pieces is it quickest, up to 64?"""
    best = overlap.best_pieces(0.002, 0.001, 20e-6)
    total = overlap.pieces_s(0.002, 0.001, 20e-6, best)
    return best, f"""More pieces leave a shorter last message, as long as sending and starts together fit beside the
        computation: 1 ms + n · 20 µs = 2 ms at n = {best}. It then takes {1e3 * total:.2f} ms, and 3.02 in one
        piece."""  # fmt: skip


@problem("µs")
def _ring():
    """Eight H100s, each at 636 TFLOP/s and 360 GB/s, hold 4,096 tokens of 8,192 features in bf16, an eighth each, and
    the 8,192 × 28,672 weights by columns. How long does the multiplication take if chunks come round a ring?"""
    gpu = hardware.gpu("H100")
    hop = 2 * 4096 * 8192 / 8 / rates.inside(gpu)
    multiply = 2 * 4096 / 8 * 8192 * (28672 / 8) / rates.matrix(gpu)
    total = overlap.ring_s(multiply, hop, 8)
    return 1e6 * total, f"""A chunk has 512 tokens. It takes 2 · 512 · 8,192 · 3,584 operations, {1e6 * multiply:.1f}
        µs, and its hop {1e6 * hop:.1f} µs. The hop is shorter, so all seven hide: 8 · {1e6 * multiply:.1f} =
        {1e6 * total:.0f} µs. (A rank has 3,584 columns, more than F/B = 1,767.)"""  # fmt: skip


@problem("times")
def _experts():
    """58 layers; half of a GPU's tokens takes 1.5 ms of attention, 1 ms of experts and 0.8 ms for each of two
    exchanges. How many times as fast are two halves that take turns?"""
    times = overlap.expert_layers_s(1.5e-3, 1.0e-3, 0.8e-3, 58)
    return times.whole / times.halves, f"""In one piece a layer takes 2 · (1.5 + 1 + 2 · 0.8) = 8.2 ms, all layers
        {1e3 * times.whole:.1f}. In halves each exchange is shorter than what stands beside it, so 58 layers take 58 · 5
        ms and the last exchange, {1e3 * times.halves:.1f} ms. The ratio is
        {times.whole / times.halves:.2f}."""  # fmt: skip


@problem("ms")
def _price():
    """Communication kernels take 20 of 132 SMs for 100 ms, and all of it hides behind matrix multiplications that could
    use every SM. By how much does it still lengthen the step?"""
    price = overlap.price_of_hiding(0.1, 20 / 132)
    return 1e3 * price, f"""While the messages travel, 20/132 = {20 / 132:.1%} of the GPU is not there for them:
        of 100 ms that is {1e3 * price:.1f} ms. (Without overlap it would be 100.)"""  # fmt: skip
