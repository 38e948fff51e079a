"""The problems of this chapter, and the way to each answer."""

from math import prod

from pardemo.book.page.problems import problem
from pardemo.finetune import metrics


def _score(name: str, written: str, wanted: str) -> float:
    return metrics.score_rows([written], [wanted])[0][name]


def _words(*numbers: int) -> str:
    """Different words, one for each number."""
    return " ".join("abcdefghijklmnopqrstuvwxyz"[number] * 3 for number in numbers)


@problem()
def _precision_and_recall():
    """A wanted headline has 16 words and a model's headline has 10, and no word comes twice in either. Of the 10 words
    8 are among the wanted ones. What is the model's ROUGE-1, in per cent?"""
    score = _score("rouge-1", _words(*range(8), 20, 21), _words(*range(16)))
    precision, recall = 8 / 10, 8 / 16
    return score, f"""Precision is 8/10 = {precision:g} and recall is 8/16 = {recall:g}. Their harmonic mean is 2 ·
        {precision:g} · {recall:g} / ({precision:g} + {recall:g}), in per cent {score:.1f}. It lies below their ordinary
        mean of {50 * (precision + recall):g}: the smaller of the two counts more."""  # fmt: skip


@problem()
def _clauses_changed():
    """A wanted headline has 14 different words, in a clause of 6 and a clause of 8. A model writes the same two clauses
    word for word, but the second one first, and its ROUGE-1 is 100. What is its ROUGE-L?"""
    first, second = range(6), range(6, 14)
    score = _score("rouge-l", _words(*second, *first), _words(*first, *second))
    return score, f"""Only words in the same order count, and of two clauses that changed places one alone can be kept:
        the longer one, with 8 words. Precision and recall are both 8/14, and so is the F1: {score:.1f}. The words are
        all there, which is why ROUGE-1 does not see the difference."""  # fmt: skip


@problem("points")
def _left_out():
    """A wanted headline has 8 different characters. A model writes the first 6 of them and then 2 wrong ones. By how
    many points of BLEU-4 does its score change if it leaves the 2 wrong ones out?"""
    wanted = "abcdefgh"
    wrong, short = _score("bleu-4", "abcdefxy", wanted), _score("bleu-4", "abcdef", wanted)
    shares = [(7 - n) / (9 - n) for n in (1, 2, 3, 4)]
    return short - wrong, f"""With the two wrong characters 6 of 8 single characters are shared, 5 of 7 runs of two, 4
        of 6 of three and 3 of 5 of four. The geometric mean of the shares is {prod(shares) ** 0.25:.3f}, a score of
        {wrong:.1f}. Without them all shares are 1, but the text is too short and is multiplied by e^(1 − 8/6):
        {short:.1f}. So it gains {short - wrong:.2f} points by saying less."""  # fmt: skip


@problem("points")
def _without_section():
    """A wanted headline has 12 different words: three for the section with its brackets, and 9 more. The base writes no
    section and 9 words, 6 of them among the 9; the tuned model writes both brackets, a wrong section between them, and
    9 words, 5 of them among the 9. By how many points of ROUGE-1 is the tuned model behind when the section is taken
    away on both sides?"""
    section, headline = (20, 21, 22), range(9)
    wanted = _words(*section, *headline)
    base = _words(*range(6), 13, 14, 15)
    beside = (*range(5), 16, 17, 18, 19)
    tuned = _words(20, 23, 22, *beside)
    ahead = _score("rouge-1", tuned, wanted) - _score("rouge-1", base, wanted)
    bare = [_score("rouge-1", text, _words(*headline)) for text in (base, _words(*beside))]
    behind = bare[0] - bare[1]
    return behind, f"""Without the section both write 9 words where 9 are wanted. The base has 6 of them, {bare[0]:.1f},
        and the tuned model 5, {bare[1]:.1f}: it is {behind:.1f} points behind. With the section it was ahead by
        {ahead:.1f} points, since the two brackets are words that it gets for nothing. Score the parts."""  # fmt: skip


@problem("minutes")
def _rows_and_minutes():
    """With 100 rows the 95 % interval of a mean score reaches 4 points to each side, and it narrows with the square
    root of the number of rows. The article's 13B wrote 1,000 headlines in 120.571 s. How long do two such models write,
    one after the other, if the interval is to reach 1 point to each side?"""
    rate = metrics.runtime_figures(1000, 125, 120.571)["predict_samples_per_second"]
    rows = 100 * (4 / 1) ** 2
    minutes = 2 * rows / rate / 60
    return minutes, f"""Four times as narrow takes 4² = 16 times as many rows, {rows:,.0f}. Two models write
        {2 * rows:,.0f} headlines at {rate:.3f} a second, which takes {minutes:.2f} minutes. Rows cost little, so take
        enough of them. (The interval still says nothing about other kinds of event.)"""  # fmt: skip
