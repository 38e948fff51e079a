"""How far a mean would move had other samples been drawn: the bootstrap (Efron 1979), also paired (Koehn 2004)."""

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
    return _resampled(values, level, resamples, seed)[0]


def paired(
    before: np.ndarray, after: np.ndarray, level: float = 95.0, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Of ``after`` − ``before``, both [samples, columns] on the same samples, each resample drawing the same of both.

    Returns:
        The interval of each column's mean difference, [columns, 2], and the share of resamples in which ``after`` is
        the better, [columns], a tie counting half.
    """
    interval, means = _resampled(after - before, level, resamples, seed)
    return interval, ((means > 0) + (means == 0) / 2).mean(axis=0)


def _resampled(values: np.ndarray, level: float, resamples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The intervals, [columns, 2], and the means of all resamples, [resamples, columns]."""
    from scipy import stats

    samples, columns = values.shape
    if samples == 1:  # scipy asks for two at least
        return np.stack([values[0], values[0]], axis=1), np.repeat(values, resamples, axis=0)
    found = stats.bootstrap(
        (values,), np.mean, axis=0, confidence_level=level / 100, n_resamples=resamples, method="percentile",
        vectorized=True, batch=max(1, _BLOCK // (samples * columns)), rng=np.random.default_rng(seed),
    )  # fmt: skip
    interval = found.confidence_interval
    return np.stack([interval.low, interval.high], axis=1), found.bootstrap_distribution.T
