"""Reads and writes bandwidths and latencies with units: ``200 Mbit/s``, ``12.5 GB/s``, ``2 ms``."""

import re

_BYTES = {"bit/s": 1 / 8, "bps": 1 / 8, "B/s": 1.0}
_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BANDWIDTH = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*([kKMGT]?)(bit/s|bps|B/s)\s*", re.ASCII)
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_LATENCY = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*(us|µs|ms|s)\s*", re.ASCII)
MOST_S = 1.0


def bytes_per_second(text: str, name: str = "bandwidth") -> float:
    """Reads ``"200 Mbit/s"`` as 25e6.

    Raises:
        ValueError: no number, no unit or an unknown one, zero or less; ``name`` begins the message.
    """
    match = _BANDWIDTH.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{name} is no bandwidth: {text!r}; write it as '200 Mbit/s' or '25 MB/s'")
    rate = float(match[1]) * _PREFIXES[match[2]] * _BYTES[match[3]]
    if not 0 < rate < float("inf"):
        raise ValueError(f"{name} must be above zero, not {text!r}")
    return rate


def bandwidth_text(rate: float) -> str:
    """Writes 25e6 as ``200 Mbit/s``."""
    bits = 8 * rate
    for prefix in ("T", "G", "M", "k"):
        if bits >= _PREFIXES[prefix]:
            return f"{bits / _PREFIXES[prefix]:.4g} {prefix}bit/s"
    return f"{bits:.4g} bit/s"


def seconds(text: str, name: str = "latency") -> float:
    """Reads ``"2 ms"`` as 0.002.

    Raises:
        ValueError: no number, no unit or an unknown one, not above zero or more than a second; ``name`` begins the
            message.
    """
    match = _LATENCY.fullmatch(text) if isinstance(text, str) else None
    value = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not 0 < value <= MOST_S:
        raise ValueError(f"{name} is a time above 0 s and of at most {MOST_S:g} s as '2 ms' or '500 us', not {text!r}")
    return value
