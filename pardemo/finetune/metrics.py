"""BLEU-4 and ROUGE of headlines, by the arithmetic of the article's tool, with confidence intervals.

ROUGE there: words cut by jieba and joined with spaces, F1 by rouge_chinese (n-grams as sets), 0 where a side has no
word. BLEU-4 there: over characters, nltk's ``sentence_bleu`` with smoothing method 3. Each sample's value is rounded to
four decimals of a per cent, the score is the mean. Published figures of other work are often over characters instead:
``char-rouge-*`` are those.
"""

import functools
import re
import warnings
from collections.abc import Callable, Sequence

import numpy as np

from pardemo.argument_checks import above_zero

WORD_ROUGE = ("rouge-1", "rouge-2", "rouge-l")
NAMES = ("bleu-4", *WORD_ROUGE, *(f"char-{name}" for name in WORD_ROUGE))
#: To the first mark that ends a sentence, with the quotes and brackets that close behind it; a point only before a
#: space or the end, since 3.5 is a number.
_SENTENCE = re.compile(r"""(?:.*?(?:[。！？!?]+|\.+(?=[\s”’」』）"')]|$))[”’」』）"')]*|.+)""", re.DOTALL)

#: Values gathered at a time, so that 80,000 samples need no more memory than 1,000.
_BLOCK = 1 << 22
_RESAMPLES = 2000


def score(predictions: Sequence[str], references: Sequence[str]) -> dict:
    """Scores of ``predictions`` against ``references``, per cent.

    Returns:
        The mean of each of :data:`NAMES`; ``intervals``, its 95 % bootstrap interval as ``[low, high]`` (2,000
        resamples of the samples, percentiles, seed 0); ``samples``, their number.

    Raises:
        ValueError: the two differ in length, are empty, or hold something else than texts.
    """
    values = _values(predictions, references)
    means = {name: float(np.mean(column)) for name, column in zip(NAMES, values.T.copy(), strict=True)}
    return means | {"intervals": _by_name(intervals(values).tolist()), "samples": len(values)}


def score_rows(predictions: Sequence[str], references: Sequence[str]) -> list[dict[str, float]]:
    """The values of every sample, in order: a dictionary by :data:`NAMES` each. Raises what :func:`score` raises."""
    return [_by_name(row) for row in _values(predictions, references).tolist()]


def intervals(values: np.ndarray, seed: int = 0) -> np.ndarray:
    """Computes a mean's 95 % percentile interval by the bootstrap, over other draws of the samples (Efron 1979).

    Args:
        values: per-sample values, [samples, columns].

    Returns:
        [columns, 2]: low and high of each column's mean. One sample alone has the interval of its own value.
    """
    from scipy import stats

    samples, columns = values.shape
    if samples == 1:  # scipy asks for two at least
        return np.stack([values[0], values[0]], axis=1)
    interval = stats.bootstrap(
        (values,), np.mean, axis=0, n_resamples=_RESAMPLES, method="percentile", vectorized=True,
        batch=max(1, _BLOCK // (samples * columns)), rng=np.random.default_rng(seed),
    ).confidence_interval  # fmt: skip
    return np.stack([interval.low, interval.high], axis=1)


def lead_baseline(text: str) -> str:
    """The first sentence of ``text`` with the mark that ends it: 。！？ or ! ? and a point before a space or the end.

    News tells what matters first, so this is what a model that writes headlines has to beat.
    """
    match = _SENTENCE.match(text.strip())
    return match.group().strip() if match else ""


def words(text: str) -> list[str]:
    """The words that ROUGE counts: jieba's cut, without those that are white space."""
    return [word for word in _cutter()(text) if word.strip()]


def runtime_figures(samples: int, steps: int, seconds: float) -> dict[str, float]:
    """The article's three run-time figures, rounded as its tool's Trainer rounds: 4, 3 and 3 decimals.

    Args:
        steps: batches, over all ranks together one a step.
    """
    above_zero(seconds, "seconds")
    return {
        "predict_runtime": round(seconds, 4),
        "predict_samples_per_second": round(samples / seconds, 3),
        "predict_steps_per_second": round(steps / seconds, 3),
    }


def _values(predictions: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """Per-sample values, [samples, len(NAMES)]."""
    for side, texts in (("predictions", predictions), ("references", references)):
        if isinstance(texts, str):
            raise ValueError(f"{side} must be a sequence of texts, not one text")
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise ValueError(f"{side}[{index}] must be a text, not {text!r}")
    if len(predictions) != len(references):
        raise ValueError(f"{len(predictions)} predictions, but {len(references)} references")
    if not len(references):
        raise ValueError("no predictions and no references: nothing to score")
    return np.array([_sample(*pair) for pair in zip(predictions, references, strict=True)])


def _sample(prediction: str, reference: str) -> list[float]:
    cut = _cutter()
    words = [" ".join(cut(text)) for text in (prediction, reference)]
    characters = [" ".join("".join(text.split())) for text in (prediction, reference)]
    values = [_bleu(prediction, reference), *_rouge(*words), *_rouge(*characters)]
    return [round(100 * value, 4) for value in values]


def _bleu(prediction: str, reference: str) -> float:
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu

    return sentence_bleu([list(reference)], list(prediction), smoothing_function=SmoothingFunction().method3)


def _rouge(prediction: str, reference: str) -> list[float]:
    """F1 by :data:`WORD_ROUGE` of two texts whose words stand between spaces."""
    from rouge_chinese import Rouge

    if not prediction.split() or not reference.split():  # rouge_chinese divides by the number of words
        return [0.0] * len(WORD_ROUGE)
    (scores,) = Rouge().get_scores(prediction, reference)
    return [scores[name]["f"] for name in WORD_ROUGE]


@functools.cache
def _cutter() -> Callable[[str], list[str]]:
    """jieba's cut with its own dictionary, by an instance of our own.

    The module's shared one prints to stderr as it starts, reads whatever ``jieba.cache`` lies in the machine's
    temporary folder, writes one there, and cuts otherwise once somebody has added words to it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of setuptools, about pkg_resources
        import jieba
    cutter = jieba.Tokenizer()
    cutter.FREQ, cutter.total = cutter.gen_pfdict(cutter.get_dict_file())
    cutter.initialized = True
    return cutter.lcut


def _by_name(values: Sequence) -> dict:
    return dict(zip(NAMES, values, strict=True))
