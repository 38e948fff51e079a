"""Bandwidths as people write them: ``200 Mbit/s``, ``12.5 GB/s``."""

import re

_UNITS = {"bit/s": 1 / 8, "bps": 1 / 8, "B/s": 1.0}
_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_FORM = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*([kKMGT]?)(bit/s|bps|B/s)\s*", re.ASCII)


def bytes_per_second(text: str, what: str = "bandwidth") -> float:
    """``"200 Mbit/s"`` -> 25e6.

    Raises:
        ValueError: no number, no unit or an unknown one, zero or less; ``what`` begins the message.
    """
    match = _FORM.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{what} is no bandwidth: {text!r}; write it as '200 Mbit/s' or '25 MB/s'")
    rate = float(match[1]) * _PREFIXES[match[2]] * _UNITS[match[3]]
    if not 0 < rate < float("inf"):
        raise ValueError(f"{what} must be above zero, not {text!r}")
    return rate


def bandwidth_text(rate: float) -> str:
    """25e6 -> ``200 Mbit/s``."""
    bits = 8 * rate
    for prefix in ("T", "G", "M", "k"):
        if bits >= _PREFIXES[prefix]:
            return f"{bits / _PREFIXES[prefix]:.4g} {prefix}bit/s"
    return f"{bits:.4g} bit/s"
