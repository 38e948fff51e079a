"""The problems of this chapter, and the way to each answer."""

import math

from pardemo.book.page.problems import problem
from pardemo.formulas import failures

#: Of Llama 3 405B on 16,384 GPUs: 54 days, 419 unexpected interruptions (arXiv 2407.21783, section 3.3.4).
_BETWEEN_S = 54 * 24 * 3600 / 419
_GPUS = 16_384


@problem("days")
def _a_smaller_job():
    """16,384 GPUs had 419 unexpected interruptions in 54 days. How many days does a job on 256 of the same GPUs run
    between two failures, on average?"""
    gpu = _BETWEEN_S * _GPUS
    days = failures.between_failures(gpu, 256) / 3600 / 24
    return days, f"""One GPU and what is around it fails every {_BETWEEN_S / 3600:.2f} · 16,384 = {gpu / 3600:,.0f}
        hours. 256 of them fail 256 times as often: every {gpu / 3600 / 256:.0f} hours, {days:.1f} days."""  # fmt: skip


@problem("times")
def _a_shorter_save():
    """Llama's job on all 16,384 saves by Young's interval. A save that held it up for 90 s copies in memory now, and
    holds it up for a sixteenth of that; the interval follows. How many times less do saves and repeated work cost
    together?"""
    shares = [failures.lost_shares(failures.young_interval(s, _BETWEEN_S), s, _BETWEEN_S) for s in (90, 90 / 16)]
    return shares[0].all / shares[1].all, f"""Saves and repeated work cost √(2·δ/μ) together, {shares[0].all:.1%} of the
        time before and {shares[1].all:.1%} after. A sixteenth of δ leaves its root, a quarter: the
        {shares[0].all / shares[1].all:g}th part."""  # fmt: skip


@problem("min")
def _restarts_alone():
    """Of that job's time, on 16,384 GPUs, restarts may cost 3 %. How long may each of them take?"""
    at_most = 0.03 / failures.lost_shares(1.0, 0.0, _BETWEEN_S, restart=1.0).restarts
    return at_most / 60, f"""Restarts cost ρ/μ of the time, whatever the interval is. 3 % of {_BETWEEN_S / 3600:.2f}
        hours are {at_most / 60:.1f} minutes: to see the failure, replace the host, start, and read the
        checkpoint."""  # fmt: skip


@problem("pieces")
def _pieces():
    """8 ranks have saved a tensor of 96 rows, and 6 ranks read it. How many pieces do they read together?"""
    pieces = sum(len(failures.resharded(96, 8, 6, rank)) for rank in range(6))
    return pieces, f"""The old ones are cut at 7 places, the new ones at 5, and {math.gcd(8, 6) - 1} of the places is
        the same. So there are 7 + 5 − 1 = 11 cuts, and {pieces} pieces between them."""  # fmt: skip


@problem("s")
def _bytes_to_a_neighbour():
    """405 billion parameters in bf16, with 12 bytes of optimizer states each, lie in equal shards on 2,048 hosts of 8
    GPUs. Each host sends its part to a neighbour over a link that reaches 40 GB/s. How long does it take?"""
    nbytes = failures.saved_bytes(405e9) / (_GPUS / 8)
    return nbytes / 40e9, f"""A parameter has 2 + 12 = 14 bytes that are saved (gradients are not). On
        {_GPUS // 8:,} hosts each has 405e9 · 14 / {_GPUS // 8:,} = {nbytes / 1e9:.2f} GB, which takes
        {nbytes / 40e9:.3f} s at 40 GB/s: less than most steps, and without any disk."""  # fmt: skip
