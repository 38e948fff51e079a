"""How far a mean would move had other samples been drawn: the bootstrap (Efron 1979), also paired (Koehn 2004)."""

from collections.abc import Iterator

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
    means = np.concatenate(list(_means(values, resamples, seed)))
    tail = (100 - level) / 2
    return np.percentile(means, [tail, 100 - tail], axis=0).T


def paired(
    before: np.ndarray, after: np.ndarray, level: float = 95.0, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Of ``after`` − ``before``, both [samples, columns] on the same samples, each resample drawing the same of both.

    Returns:
        The interval of each column's mean difference, [columns, 2], and the share of resamples in which ``after`` is
        the better, [columns], a tie counting half.
    """
    means = np.concatenate(list(_means(after - before, resamples, seed)))
    tail = (100 - level) / 2
    return np.percentile(means, [tail, 100 - tail], axis=0).T, ((means > 0) + (means == 0) / 2).mean(axis=0)


def _means(values: np.ndarray, resamples: int, seed: int) -> Iterator[np.ndarray]:
    """Column means of ``resamples`` draws with replacement, a block of draws at a time."""
    random = np.random.default_rng(seed)
    samples, columns = values.shape
    block = max(1, _BLOCK // (samples * columns))
    for begin in range(0, resamples, block):
        picks = random.integers(samples, size=(min(block, resamples - begin), samples))
        yield values[picks].mean(axis=1)  # [block, samples, columns] -> [block, columns]
