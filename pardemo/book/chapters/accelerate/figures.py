"""Pictures of *Accelerate*: one script under several configurations, silent mistakes, and what to take."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.patches import Rectangle

from pardemo.book.chapters.accelerate.drawings import CONFIGURATIONS
from pardemo.draw import palette
from pardemo.draw.charts import bar_chart
from pardemo.draw.style import Picture, new, save

#: What a rank keeps -> its label, and how it is filled.
_KEPT = {
    "parameters": ("parameters", ("parameters", "")),
    "gradients": ("gradients", ("gradients", "//")),
    "optimizer states": ("optimizer states", ("optimizer states", "..")),
    "others": ("buckets, others", (palette.OTHER, "xx")),
}


def configurations_compared(
    sent: Mapping[str, float], kept: Mapping[str, Mapping[str, float]], sends: Mapping[str, float],
    keeps: Mapping[str, float],
) -> Picture:  # fmt: skip
    """What each configuration of one script sends in a step, in Ψ, and keeps, in bytes per parameter.

    Outlines are the papers'.

    Args:
        sent, sends: counted and predicted, by configuration. kept: configuration -> kind -> bytes per parameter.
        keeps: predicted sums of the model states, so without what is "others".
    """
    series = {label: {name: of.get(kind, 0.0) for name, of in kept.items()} for kind, (label, _) in _KEPT.items()}
    texts = []
    for of in kept.values():
        more = of.get("others", 0.0)
        texts.append(f"{sum(of.values()) - more:.1f}" + (f" + {more:.1f}" if more > 0.2 else ""))
    sent_panel = {"series": {"sent": {name: sent[name] for name in kept}}, "outline": sends, "text": "{:.2f} Ψ"}
    return bar_chart(
        "accelerate_configurations", "A rank of each configuration: {} per parameter.",
        {"sent by a rank in a step, Ψ": sent_panel | {"fills": {"sent": ("communication", "")}},
         "kept by a rank, bytes per parameter": {
             "series": series, "outline": keeps, "stacked": True, "text": texts, "fills": dict(_KEPT.values())}},
        across=True, outlined="the papers'", room=1.25, ncols=3, size=(5.8, 2.0 + 0.78 * len(kept)),
    )  # fmt: skip


def losses_of_mistakes(runs: Mapping[str, tuple[Sequence[float], str]]) -> Picture:
    """The loss of the first step and of the last of each run, and what an assertion says of it (nothing: all is well).

    Args:
        runs: name -> losses, what the assertion says.
    """
    fig, ax = new(size=(5.8, 1.0 + 0.62 * len(runs)))
    places = np.arange(len(runs))
    colours = [palette.VERDICTS["fails" if message else "holds"] for _, message in runs.values()]
    first, last = ([of[at] for of, _ in runs.values()] for at in (0, -1))
    for place, begin, end, colour in zip(places, first, last, colours, strict=True):
        ax.annotate("", (end, place), (begin, place), arrowprops={"arrowstyle": "->", "color": colour, "lw": 2.2})
    ax.scatter(first, places, s=52, facecolor="white", edgecolor=colours, linewidth=1.8, zorder=3)
    ax.scatter(last, places, s=52, color=colours, zorder=3)
    ax.set_yticks(places, [f"{name}\n{message or 'all is well'}" for name, (_, message) in runs.items()])
    low, high = min(last), max(first)
    ax.set(xlabel="loss, from the first step to the fourth", ylim=(len(runs) - 0.4, -0.6))
    ax.set_xlim(low - 0.1 * (high - low), high + 0.1 * (high - low))
    ax.grid(axis="y", visible=False)
    values_text = "; ".join(
        f"{name} from {of[0]:.3f} to {of[-1]:.3f}: {message or 'well'}" for name, (of, message) in runs.items()
    )
    return save(
        fig,
        "accelerate_mistakes",
        f"The loss falls in every run, and an assertion says why it is wrong: {values_text}.",
    )


def sent_to_peers(measured: Mapping[str, float], expected: Mapping[str, float]) -> Picture:
    """MB that rank 0 sends to its tensor-parallel peer, to its data-parallel peer and to the rank that is neither.

    Outlines are what the papers of the two engines say.
    """
    return bar_chart(
        "accelerate_groups", "Sent by rank 0 in a step: {}.",
        {"sent by rank 0 in a step, MB": {"series": {"measured": measured}, "outline": expected}}, across=True,
        per=1e6, fills={"measured": "communication"}, text="{:.2f} MB", outlined="the papers'", room=1.25,
    )  # fmt: skip


def kept_against_sent(ways: Mapping[str, Sequence[tuple[float, float]]], counts: Sequence[int]) -> Picture:
    """What a rank keeps against what it sends in a step, a line for each configuration over numbers of micro-batches.

    Args:
        ways: configuration -> for each of ``counts``: Ψ sent, bytes per parameter kept.
        counts: micro-batches in a step.
    """
    fig, ax = new(size=(5.8, 3.9))
    colours = [CONFIGURATIONS[of] for of in ("DDP", "ZeRO-1", "ZeRO-2", "FSDP2")]
    for (name, points), marker, colour in zip(ways.items(), "osD^", colours, strict=True):
        sent, kept = zip(*points, strict=True)
        marked = {"marker": marker, "markersize": 9, "markerfacecolor": colour, "label": name}
        ax.plot(sent, kept, color=palette.INK, linewidth=1.2, **marked)
        for at, count in enumerate(counts if sent[0] != sent[-1] else ()):
            # below the marker; of the upper line beside it, or it would lie on the lower one's
            offset, ha, va = ((7, 4), "left", "bottom") if name == "ZeRO-2" else ((0, -9), "center", "top")
            ax.annotate(f"{count}", (sent[at], kept[at]), offset, textcoords="offset points", ha=ha, va=va)
    most_sent, most_kept = (max(point[of] for points in ways.values() for point in points) for of in (0, 1))
    ax.set(xlabel="sent by a rank in a step, Ψ", ylabel="kept by a rank, bytes per parameter")
    ax.set(xlim=(0, 1.1 * most_sent), ylim=(0, 1.12 * most_kept))
    ax.legend(loc="upper right", title="number: micro-batches")
    values_text = "; ".join(
        f"{name}: " + ", ".join(f"{of[0]:.3g} Ψ with {count}" for of, count in zip(points, counts, strict=True))
        + f" micro-batches, {points[0][1]:.3g} bytes"
        for name, points in ways.items()
    )  # fmt: skip
    return save(fig, "accelerate_traded", f"What a rank keeps per parameter and sends in a step. {values_text}.")


def which_configuration(models: Sequence[str], gpus: Sequence[int], take: Callable[[str, int], str]) -> Picture:
    """A map: models against GPUs, and in each cell what ``take(model, gpus)`` says.

    Raises:
        ValueError: an answer that the map has no colour for.
    """
    fig, ax = new(size=(6.8, 1.3 + 0.52 * len(models)))
    rows = []
    for row, model in enumerate(models):
        answers = [take(model, n) for n in gpus]
        for column, answer in enumerate(answers):
            if answer not in CONFIGURATIONS:
                raise ValueError(f"the map has {', '.join(CONFIGURATIONS)}, not {answer!r}")
            ax.add_patch(
                Rectangle((column, row), 1, 1, facecolor=CONFIGURATIONS[answer], edgecolor=palette.INK, linewidth=0.8)
            )
            words = answer.replace("more ", "more\n").replace("one ", "one\n")
            ax.text(column + 0.5, row + 0.5, words, ha="center", va="center", color=palette.INK, fontsize=10)
        rows.append(f"{model}: " + ", ".join(f"{n} {a}" for n, a in zip(gpus, answers, strict=True)))
    ax.set(xlim=(0, len(gpus) + 0.02), ylim=(len(models), 0), xlabel="H100s, eight in a node")
    ax.set_xticks(np.arange(len(gpus)) + 0.5, [f"{n:,}" for n in gpus])
    ax.set_yticks(np.arange(len(models)) + 0.5, list(models))
    ax.tick_params(length=0)
    ax.grid(visible=False)
    return save(fig, "accelerate_which", f"What to take for a model, by the number of GPUs. {'; '.join(rows)}.")
