"""Pictures of chapter 12: scores of four answers, draws of rows, what is copied, sections, where a model stops."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from pardemo.book.chapters.baichuan2_evaluate.figures_scores import scores
from pardemo.draw import palette
from pardemo.draw.style import COLOURS, Picture, new, save


def scores_of_answers(found: Mapping[str, Mapping[str, Mapping]], measures: Mapping[str, str]) -> Picture:
    """A panel for each measure: the scores of answers on groups of rows with their 95 % intervals.

    Args:
        found: answer -> group -> what :func:`pardemo.finetune.metrics.score` returns. measures: its name -> a title.
    """
    groups = list(next(iter(found.values())))
    fig, axes = new(len(measures), 1, size=(5.6, 2.6 * len(measures)))
    told_below = [answer.replace(", ", ",\n").replace("first ", "first\n") for answer in found]
    for ax, (measure, title) in zip(np.atleast_1d(axes), measures.items(), strict=True):
        values = {answer: [of[group][measure] for group in groups] for answer, of in found.items()}
        spans = {answer: [of[group]["intervals"][measure] for group in groups] for answer, of in found.items()}
        scores(ax, values, spans, groups)
        ax.get_legend().remove()
        ax.set(ylim=(0, 115), yticks=range(0, 101, 25), ylabel=f"{title}, %")
        ax.set_xticklabels(told_below)
    handles, labels = ax.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper center", ncols=len(groups), fontsize=9, columnspacing=1)
    rouge = {answer: [f"{of[group]['rouge-l']:.0f}" for group in groups] for answer, of in found.items()}
    told = "; ".join(f"{answer}: {', '.join(values)}" for answer, values in rouge.items())
    return save(
        fig, "baichuan2_evaluate_scores", f"Scores by answer on {', '.join(groups)}, 95 % intervals; ROUGE-L {told}."
    )


def draws(differences: Mapping[str, Sequence[float]]) -> Picture:
    """How far the tuned model is ahead of a rival in each draw of the rows, as histograms below one another."""
    fig, axes = new(len(differences), 1, size=(5.6, 1.7 * len(differences)), sharex=True)
    edges = np.histogram_bin_edges(np.concatenate(list(differences.values())), 60)
    for ax, (name, found) in zip(np.atleast_1d(axes), differences.items(), strict=True):
        found = np.asarray(found)
        for side, colour, label in (
            (found[found <= 0], palette.OTHER, "tuned behind"),
            (found[found > 0], palette.NEW, "tuned ahead"),
        ):
            ax.hist(side, edges, color=colour, edgecolor="white", linewidth=0.4, label=label)
        ax.axvline(0, color="black", linewidth=1.2)
        ax.set_title(f"{name}: ahead in {np.mean(found > 0):.1%} of the draws")
        ax.set(yticks=[], ylabel="draws")
        ax.grid(axis="y", visible=False)
    ax.set(xlabel="tuned less base in its own form, points of the score")
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    told = "; ".join(f"{name} {np.mean(np.asarray(found) > 0):.1%}" for name, found in differences.items())
    return save(
        fig, "baichuan2_evaluate_draws", f"Differences over draws of the rows; the tuned model is ahead in: {told}."
    )


def where_it_stops(shares: Mapping[str, Mapping[str, float]], rows: int) -> Picture:
    """For each thing that can be right, the share of rows in which it is, by group; two standard errors as whiskers.

    Args:
        rows: of each group.
    """
    fig, ax = new(size=(5.6, 3.2))
    width = 0.8 / len(shares)
    for index, ((group, found), colour) in enumerate(zip(shares.items(), (*palette.KNOWN, palette.NEW), strict=True)):
        at = np.arange(len(found)) + (index - (len(shares) - 1) / 2) * width
        _with_errors(ax, at, [(share, (share * (1 - share) / rows) ** 0.5) for share in found.values()], width, colour)
        ax.bar(at, 0, color=colour, label=group)
    ax.set_xticks(range(len(found)), list(found))
    ax.set(ylabel="of the rows, %", ylim=(0, 118), yticks=range(0, 101, 25))
    ax.grid(axis="x", visible=False)
    fig.legend(loc="outside upper center", ncols=len(shares), fontsize=9, columnspacing=1)
    told = "; ".join(f"{g}: {', '.join(f'{n} {s:.0%}' for n, s in found.items())}" for g, found in shares.items())
    return save(fig, "baichuan2_evaluate_where", f"What the tuned model gets right. {told}.")


def copied_words(found: Mapping[str, Mapping[str, Sequence[float]]]) -> Picture:
    """For each way to count, the mean of a base and of a tuned model; two standard errors as whiskers.

    Args:
        found: model -> what is counted -> a share for each row.
    """
    fig, ax = new(size=(5.6, 3.2))
    width = 0.8 / len(found)
    for index, ((model, counted), colour) in enumerate(
        zip(found.items(), (palette.KNOWN[1], palette.NEW), strict=True)
    ):
        at = np.arange(len(counted)) + (index - (len(found) - 1) / 2) * width
        means = [(np.mean(of), np.std(of) / len(of) ** 0.5) for of in counted.values()]
        _with_errors(ax, at, means, width, colour)
        ax.bar(at, 0, color=colour, label=model)
    ax.set_xticks(range(len(counted)), list(counted))
    ax.set(ylabel="%", ylim=(0, 100), yticks=range(0, 101, 25))
    ax.grid(axis="x", visible=False)
    fig.legend(loc="outside upper center", ncols=len(found))
    told = "; ".join(f"{m}: " + ", ".join(f"{n} {np.mean(of):.0%}" for n, of in c.items()) for m, c in found.items())
    return save(fig, "baichuan2_evaluate_copied", f"What is copied from the news, without the section. {told}.")


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
    told = ", ".join(f"{n} {wanted.get(n, 0)}, {named.get(n, 0)}, {right.get(n, 0)}" for n in names)
    return save(
        fig, "baichuan2_evaluate_sections", f"Rows in which a section is wanted, named, and rightly named: {told}."
    )


def _with_errors(ax: Axes, at: np.ndarray, shares: Sequence[tuple[float, float]], width: float, colour: str) -> None:
    """Bars of shares with two standard errors, and their per cent above."""
    for x, (share, error) in zip(at, shares, strict=True):
        ax.bar(x, 100 * share, 0.9 * width, color=colour, yerr=200 * error, capsize=2.5, error_kw={"elinewidth": 1})
        above = (x, 100 * (share + 2 * error))
        ax.annotate(f"{100 * share:.0f}", above, (0, 3), textcoords="offset points", ha="center")
