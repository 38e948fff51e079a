"""Pictures of *Baichuan2: before and after*: scores, draws of rows, what is copied, sections, what is right."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from pardemo.draw import palette
from pardemo.draw.style import COLOURS, Picture, new, save

_SHADES = (*palette.KNOWN, palette.NEW)  # what is known in greys; what is new in colour


def scores(
    ax: Axes,
    values: Mapping[str, Sequence[float]],
    intervals: Mapping[str, Sequence[Sequence[float]]],
    groups: Sequence[str],
) -> None:
    """A cluster of bars for each answer, one for each of three groups, with the interval as a whisker and the value.

    Args:
        values: answer -> a score by group. intervals: answer -> ``[low, high]`` by group.
    """
    places, width = np.arange(len(values)), 0.8 / len(groups)
    for index, (group, shade) in enumerate(zip(groups, _SHADES, strict=True)):
        heights = np.array([row[index] for row in values.values()])
        ends = np.array([row[index] for row in intervals.values()])
        reach = [heights - ends[:, 0], ends[:, 1] - heights]
        at = places + (index - (len(groups) - 1) / 2) * width
        whisker = {"elinewidth": 1, "ecolor": "black"}
        ax.bar(at, heights, width * 0.9, color=shade, yerr=reach, capsize=2.5, error_kw=whisker, label=group, zorder=2)
        for x, height, end in zip(at, heights, ends[:, 1], strict=True):
            style = {"textcoords": "offset points", "ha": "center", "size": 10}
            ax.annotate(f"{height:.0f}", (x, max(height, end)), (0, 3), **style)
    ax.set_xticks(places, list(values))
    ax.grid(axis="x", visible=False)
    ax.legend(loc="upper center", ncols=len(groups), fontsize=10)


def scores_of_answers(results: Mapping[str, Mapping[str, Mapping]], measures: Mapping[str, str]) -> Picture:
    """A panel for each measure: the scores of answers on groups of rows with their 95 % intervals.

    Args:
        results: answer -> group -> what :func:`pardemo.finetune.metrics.score` returns. measures: its name -> a title.
    """
    groups = list(next(iter(results.values())))
    fig, axes = new(len(measures), 1, size=(5.6, 2.6 * len(measures)))
    tick_labels = [answer.replace(", ", ",\n").replace("first ", "first\n") for answer in results]
    for ax, (measure, title) in zip(np.atleast_1d(axes), measures.items(), strict=True):
        values = {answer: [of[group][measure] for group in groups] for answer, of in results.items()}
        spans = {answer: [of[group]["intervals"][measure] for group in groups] for answer, of in results.items()}
        scores(ax, values, spans, groups)
        ax.get_legend().remove()
        ax.set(ylim=(0, 115), yticks=range(0, 101, 25), ylabel=f"{title}, %")
        ax.set_xticklabels(tick_labels)
    handles, labels = ax.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper center", ncols=len(groups), fontsize=10, columnspacing=1)
    rouge = {answer: [f"{of[group]['rouge-l']:.0f}" for group in groups] for answer, of in results.items()}
    values_text = "; ".join(f"{answer}: {', '.join(values)}" for answer, values in rouge.items())
    return save(
        fig,
        "baichuan2_evaluate_scores",
        f"Scores by answer on {', '.join(groups)}, 95 % intervals; ROUGE-L {values_text}.",
    )


def draws(differences: Mapping[str, Sequence[float]]) -> Picture:
    """How far the tuned model is ahead of a rival in each draw of the rows, as histograms below one another."""
    fig, axes = new(len(differences), 1, size=(5.6, 1.7 * len(differences)), sharex=True)
    edges = np.histogram_bin_edges(np.concatenate(list(differences.values())), 60)
    for ax, (name, values) in zip(np.atleast_1d(axes), differences.items(), strict=True):
        values = np.asarray(values)
        for side, colour, label in (
            (values[values <= 0], palette.OTHER, "tuned behind"),
            (values[values > 0], palette.NEW, "tuned ahead"),
        ):
            ax.hist(side, edges, color=colour, edgecolor="white", linewidth=0.4, label=label)
        ax.axvline(0, color="black", linewidth=1.2)
        ax.set_title(f"{name}: ahead in {np.mean(values > 0):.1%} of the draws")
        ax.set(yticks=[], ylabel="draws")
        ax.grid(axis="y", visible=False)
    ax.set(xlabel="tuned less base in its own form, points of the score")
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    values_text = "; ".join(f"{name} {np.mean(np.asarray(values) > 0):.1%}" for name, values in differences.items())
    return save(
        fig,
        "baichuan2_evaluate_draws",
        f"Differences over draws of the rows; the tuned model is ahead in: {values_text}.",
    )


def where_it_stops(shares: Mapping[str, Mapping[str, float]], rows: int) -> Picture:
    """For each thing that can be right, the share of rows in which it is, by group; two standard errors as whiskers.

    Args:
        rows: of each group.
    """
    fig, ax = new(size=(5.6, 3.2))
    width = 0.8 / len(shares)
    for index, ((group, group_shares), colour) in enumerate(
        zip(shares.items(), (*palette.KNOWN, palette.NEW), strict=True)
    ):
        at = np.arange(len(group_shares)) + (index - (len(shares) - 1) / 2) * width
        _with_errors(
            ax, at, [(share, (share * (1 - share) / rows) ** 0.5) for share in group_shares.values()], width, colour
        )
        ax.bar(at, 0, color=colour, label=group)
    ax.set_xticks(range(len(group_shares)), list(group_shares))
    ax.set(ylabel="of the rows, %", ylim=(0, 118), yticks=range(0, 101, 25))
    ax.grid(axis="x", visible=False)
    fig.legend(loc="outside upper center", ncols=len(shares), fontsize=10, columnspacing=1)
    values_text = "; ".join(
        f"{g}: {', '.join(f'{n} {s:.0%}' for n, s in group_shares.items())}" for g, group_shares in shares.items()
    )
    return save(fig, "baichuan2_evaluate_where", f"What the tuned model gets right. {values_text}.")


def copied_words(shares: Mapping[str, Mapping[str, Sequence[float]]]) -> Picture:
    """For each way to count, the mean of a base and of a tuned model; two standard errors as whiskers.

    Args:
        shares: model -> what is counted -> a share for each row.
    """
    fig, ax = new(size=(5.6, 3.2))
    width = 0.8 / len(shares)
    for index, ((model, counted), colour) in enumerate(
        zip(shares.items(), (palette.KNOWN[1], palette.NEW), strict=True)
    ):
        at = np.arange(len(counted)) + (index - (len(shares) - 1) / 2) * width
        means = [(np.mean(of), np.std(of) / len(of) ** 0.5) for of in counted.values()]
        _with_errors(ax, at, means, width, colour)
        ax.bar(at, 0, color=colour, label=model)
    ax.set_xticks(range(len(counted)), list(counted))
    ax.set(ylabel="%", ylim=(0, 100), yticks=range(0, 101, 25))
    ax.grid(axis="x", visible=False)
    fig.legend(loc="outside upper center", ncols=len(shares))
    values_text = "; ".join(
        f"{m}: " + ", ".join(f"{n} {np.mean(of):.0%}" for n, of in c.items()) for m, c in shares.items()
    )
    return save(fig, "baichuan2_evaluate_copied", f"What is copied from the news, without the section. {values_text}.")


def sections_named(wanted: Mapping[str, int], named: Mapping[str, int], right: Mapping[str, int]) -> Picture:
    """In how many rows each section is the wanted one (outline), is named (bar), and is rightly named (dark part)."""
    names = list(dict.fromkeys([*wanted, *named]))
    fig, ax = new(size=(5.6, 0.34 * len(names) + 1.3))
    for row, name in enumerate(names):
        ax.barh(row, named.get(name, 0), 0.5, color=palette.NEW, label="named" if not row else None)
        ax.barh(row, right.get(name, 0), 0.5, color=COLOURS["holds"], label="rightly named" if not row else None)
        outline = {"fill": False, "edgecolor": "black", "linewidth": 1.2, "label": "wanted" if not row else None}
        ax.barh(row, wanted.get(name, 0), 0.8, **outline)
    ax.set_yticks(range(len(names)), names)
    ax.set(xlabel="rows of a hundred", ylim=(len(names) - 0.4, -0.6))
    ax.grid(axis="y", visible=False)
    fig.legend(loc="outside upper center", ncols=3)
    values_text = ", ".join(f"{n} {wanted.get(n, 0)}, {named.get(n, 0)}, {right.get(n, 0)}" for n in names)
    return save(
        fig,
        "baichuan2_evaluate_sections",
        f"Rows in which a section is wanted, named, and rightly named: {values_text}.",
    )


def _with_errors(ax: Axes, at: np.ndarray, shares: Sequence[tuple[float, float]], width: float, colour: str) -> None:
    """Bars of shares with two standard errors, and their per cent above."""
    for x, (share, error) in zip(at, shares, strict=True):
        ax.bar(x, 100 * share, 0.9 * width, color=colour, yerr=200 * error, capsize=2.5, error_kw={"elinewidth": 1})
        above = (x, 100 * (share + 2 * error))
        ax.annotate(f"{100 * share:.0f}", above, (0, 3), textcoords="offset points", ha="center")
