"""How far a mean would move had other samples been drawn: the bootstrap (Efron 1979)."""

import numpy as np

RESAMPLES = 2000
#: Values gathered at a time, so that 80,000 samples need no more memory than 1,000.
_BLOCK = 1 << 22


def intervals(values: np.ndarray, level: float = 95.0, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """The percentile interval of each column's mean.

    Args:
        values: per-sample values, [samples, columns].
        level: of the interval, per cent.

    Returns:
        [columns, 2]: low and high. One sample alone has the interval of its own value.
    """
    from scipy import stats

    samples, columns = values.shape
    if samples == 1:  # scipy asks for two at least
        return np.stack([values[0], values[0]], axis=1)
    found = stats.bootstrap(
        (values,), np.mean, axis=0, confidence_level=level / 100, n_resamples=resamples, method="percentile",
        vectorized=True, batch=max(1, _BLOCK // (samples * columns)), rng=np.random.default_rng(seed),
    )  # fmt: skip
    interval = found.confidence_interval
    return np.stack([interval.low, interval.high], axis=1)
