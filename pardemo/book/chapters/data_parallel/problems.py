"""The problems of this chapter, and the way to each answer."""

from pardemo.book.page.problems import problem
from pardemo.formulas import communication

_BF16 = 2  # bytes


@problem("GB")
def _gradients_of_seven_billion():
    """A model has 7 billion parameters, and its gradients are bf16. How much does each of 8 GPUs send in a ring
    all-reduce of them?"""
    size = _BF16 * 7e9
    sent = communication.ring_all_reduce(size, 8).sent
    return sent / 1e9, f"""In bf16 the gradients are {size / 1e9:g} GB. On a ring each GPU sends 2(N−1)/N of them,
        {sent / size:g} times as much: {sent / 1e9:g} GB."""  # fmt: skip


@problem("s")
def _seconds_of_them():
    """The same all-reduce, and each GPU has a link of 50 GB/s each way. How long does it take if nothing is hidden and
    messages start at once?"""
    seconds = communication.cluster_seconds("ring", _BF16 * 7e9, 8, 50e9)
    return seconds, f"""What it sends goes through its link at 50 GB/s: {seconds:.2f} s. Its link receives as much at
        the same time, in the other direction, which takes no time of its own."""  # fmt: skip


@problem("times")
def _busiest_link():
    """16 ranks. How many times as much does a parameter server send as a rank of a ring does?"""
    server, ring = communication.parameter_server(1, 16).sent, communication.ring_all_reduce(1, 16).sent
    return server / ring, f"""The server sends each of the others a whole copy, {server:g}·S. On the ring everybody
        sends 2(N−1)/N·S = {ring:g}·S. The ratio is N/2 = {server / ring:g}, so it grows with every GPU."""  # fmt: skip


@problem("ms")
def _small_messages():
    """A ring of 64 GPUs sums a tensor of a few bytes, and a message takes 20 µs. How long does the all-reduce take?"""
    messages = communication.all_reduce_steps("ring", 64)
    milliseconds = 1e3 * communication.cluster_seconds("ring", 0, 64, 50e9, 20e-6)
    return milliseconds, f"""Each of the 2(N−1) = {messages} messages waits for the one before it, whatever its size:
        {messages} · 20 µs = {milliseconds:g} ms."""  # fmt: skip


@problem("MB")
def _where_bytes_win():
    """Eight GPUs, 10 GB/s, 20 µs a message. At which size of a bucket does a ring all-reduce spend as long on starting
    messages as on sending bytes?"""
    messages, share = communication.all_reduce_steps("ring", 8), communication.ring_all_reduce(1, 8).sent
    starting = messages * 20e-6
    megabytes = starting * 10e9 / share / 1e6
    return megabytes, f"""The {messages} messages take {1e6 * starting:g} µs to start. In that time a link of 10 GB/s
        carries {starting * 10e9 / 1e6:g} MB, and the ring sends {share:g}·S, so S = {megabytes:g} MB. Smaller buckets
        mostly wait."""  # fmt: skip
