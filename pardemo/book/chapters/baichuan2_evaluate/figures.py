"""Pictures of *Baichuan2: before and after*: scores, draws of rows, what is copied, sections, what is right."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from pardemo.draw import palette
from pardemo.draw.charts import bars, key, numbers, words
from pardemo.draw.style import Picture, new, save

_SHADES = (*palette.KNOWN, palette.NEW)  # what is known in greys; what is new in colour


def _with_intervals(
    ax: Axes, series: Mapping[str, Mapping[str, float]], intervals: Mapping[str, Sequence[Sequence[float]]],
    shades: Sequence[str] = _SHADES,
) -> None:  # fmt: skip
    """A cluster of bars for each group, in per cent, with an interval as a whisker and the value above it.

    Args:
        series: name -> group -> per cent. intervals: name -> ``[low, high]`` by group.
    """
    bars(ax, series, fills=dict(zip(series, shades, strict=True)))
    each = 0.84 / len(series)
    for number, (name, values) in enumerate(series.items()):
        heights, ends = np.array(list(values.values())), np.array(intervals[name])
        at = np.arange(len(heights)) + (number - (len(series) - 1) / 2) * each
        style = {"fmt": "none", "ecolor": "black", "elinewidth": 1, "capsize": 2.5, "zorder": 4}
        ax.errorbar(at, heights, (heights - ends[:, 0], ends[:, 1] - heights), **style)
        numbers(ax, at, np.maximum(heights, ends[:, 1]), [f"{height:.0f}" for height in heights])
    ax.set(ylim=(0, 118), yticks=range(0, 101, 25))


def scores_of_answers(results: Mapping[str, Mapping[str, Mapping]], measures: Mapping[str, str]) -> Picture:
    """A panel for each measure: the scores of answers on groups of rows with their 95 % intervals.

    Args:
        results: answer -> group -> what :func:`pardemo.finetune.metrics.score` returns. measures: its name -> a title.
    """
    groups = list(next(iter(results.values())))
    fig, axes = new(len(measures), 1, size=(5.6, 2.6 * len(measures)), squeeze=False)
    for ax, (measure, title) in zip(axes.flat, measures.items(), strict=True):
        values = {group: {answer: scores[group][measure] for answer, scores in results.items()} for group in groups}
        ends = {group: [scores[group]["intervals"][measure] for scores in results.values()] for group in groups}
        _with_intervals(ax, values, ends)
        ax.set_ylabel(f"{title}, %")
    key(fig, loc="outside upper center", ncols=len(groups), fontsize=10, columnspacing=1)
    rouge = {answer: [scores[group]["rouge-l"] for group in groups] for answer, scores in results.items()}
    alt = f"Scores by answer on {', '.join(groups)}, 95 % intervals; ROUGE-L {words(rouge, '{:.0f}')}."
    return save(fig, "baichuan2_evaluate_scores", alt)


def draws(differences: Mapping[str, Sequence[float]]) -> Picture:
    """Plots how far the tuned model is ahead of a rival in each draw of the rows, as histograms below one another."""
    fig, axes = new(len(differences), 1, size=(5.6, 1.7 * len(differences)), sharex=True, squeeze=False)
    edges = np.histogram_bin_edges(np.concatenate(list(differences.values())), 60)
    ahead = {}
    for ax, (name, values) in zip(axes.flat, differences.items(), strict=True):
        values = np.asarray(values)
        for side, colour, label in (
            (values[values <= 0], palette.OTHER, "tuned behind"),
            (values[values > 0], palette.NEW, "tuned ahead"),
        ):
            ax.hist(side, edges, color=colour, edgecolor="white", linewidth=0.4, label=label)
        ahead[name] = np.mean(values > 0)
        ax.axvline(0, color="black", linewidth=1.2)
        ax.set(title=f"{name}: ahead in {ahead[name]:.1%} of the draws", yticks=[], ylabel="draws")
        ax.grid(axis="y", visible=False)
    axes[-1, 0].set(xlabel="tuned less base in its own form, points of the score")
    key(fig)
    alt = f"Differences over draws of the rows; the tuned model is ahead in: {words(ahead, '{:.1%}')}."
    return save(fig, "baichuan2_evaluate_draws", alt)


def _shares(
    name: str, alt: str, shares: Mapping[str, Mapping[str, tuple[float, float]]], shades: Sequence[str]
) -> Picture:
    """Bars of shares with two standard errors as whiskers: name -> what is counted -> its share and standard error."""
    fig, ax = new(size=(5.6, 3.2))
    values = {model: {end: 100 * share for end, (share, _) in each.items()} for model, each in shares.items()}
    ends = {
        model: [(100 * (share - 2 * error), 100 * (share + 2 * error)) for share, error in each.values()]
        for model, each in shares.items()
    }
    _with_intervals(ax, values, ends, shades)
    ax.set_ylabel("%")
    key(fig, loc="outside upper center", ncols=len(shares), fontsize=10, columnspacing=1)
    return save(fig, name, f"{alt} {words(values, '{:.0f}%')}.")


def where_it_stops(shares: Mapping[str, Mapping[str, float]], rows: int) -> Picture:
    """For each thing that can be right, the share of rows in which it is, by group; two standard errors as whiskers.

    Args:
        rows: of each group.
    """
    errors = {
        group: {ending: (share, (share * (1 - share) / rows) ** 0.5) for ending, share in by_ending.items()}
        for group, by_ending in shares.items()
    }
    return _shares("baichuan2_evaluate_where", "What the tuned model gets right.", errors, _SHADES)


def copied_words(shares: Mapping[str, Mapping[str, Sequence[float]]]) -> Picture:
    """For each way to count, the mean of a base and of a tuned model; two standard errors as whiskers.

    Args:
        shares: model -> what is counted -> a share for each row.
    """
    means = {
        model: {kind: (float(np.mean(v)), np.std(v) / len(v) ** 0.5) for kind, v in counted.items()}
        for model, counted in shares.items()
    }
    alt = "What is copied from the news, without the section."
    return _shares("baichuan2_evaluate_copied", alt, means, (palette.KNOWN[1], palette.NEW))


def sections_named(wanted: Mapping[str, int], named: Mapping[str, int], right: Mapping[str, int]) -> Picture:
    """In how many rows each section is the wanted one (outline), is named (bar), and is rightly named (dark part)."""
    names = list(dict.fromkeys([*wanted, *named]))
    fig, ax = new(size=(5.6, 0.34 * len(names) + 1.3))
    series = {
        "rightly named": {name: right.get(name, 0) for name in names},
        "named": {name: named.get(name, 0) - right.get(name, 0) for name in names},
    }
    fills = {"rightly named": "holds", "named": palette.NEW}
    bars(ax, series, {name: wanted.get(name, 0) for name in names}, across=True, stacked=True, fills=fills,
         outlined="wanted")  # fmt: skip
    ax.set(xlabel="rows of a hundred")
    key(fig, loc="outside upper center", ncols=3)
    summary = ", ".join(f"{n} {wanted.get(n, 0)}, {named.get(n, 0)}, {right.get(n, 0)}" for n in names)
    alt = f"Rows in which a section is wanted, named, and rightly named: {summary}."
    return save(fig, "baichuan2_evaluate_sections", alt)
