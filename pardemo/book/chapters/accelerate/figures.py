"""Pictures of *Accelerate*: one script under several configurations, silent mistakes, and what to take."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.patches import Patch, Rectangle

from pardemo.book.chapters.accelerate.drawings_choice import CONFIGURATIONS
from pardemo.draw import palette
from pardemo.draw.style import COLOURS, Picture, new, save

_HATCHES = {"parameters": "", "gradients": "//", "optimizer states": "..", "others": "xx"}


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
    names = list(kept)
    fig, axes = new(2, 1, size=(5.8, 2.0 + 0.78 * len(names)))
    places, outline = np.arange(len(names)), {"fill": False, "edgecolor": "black", "linewidth": 1.2}
    values = [sent[name] for name in names]
    axes[0].barh(places, values, 0.55, color=COLOURS["communication"], label="sent")
    axes[0].barh(places, [sends[name] for name in names], 0.7, label="predicted", **outline)
    left = np.zeros(len(names))
    for kind, hatch in _HATCHES.items():
        colour, label = (palette.OTHER, "buckets, others") if kind == "others" else (COLOURS[kind], kind)
        parts = np.array([kept[name].get(kind, 0.0) for name in names])
        style = {"color": colour, "hatch": hatch, "edgecolor": "white", "label": label}
        axes[1].barh(places, parts, 0.55, left=left, **style)
        left += parts
    axes[1].barh(places, [keeps[name] for name in names], 0.7, **outline)
    others = [kept[name].get("others", 0.0) for name in names]
    states = [
        f"{end - more:.1f}" + (f" + {more:.1f}" if more > 0.2 else "") for end, more in zip(left, others, strict=True)
    ]
    for ax, ends, lines, texts in (
        (axes[0], values, sends, [f"{value:.2f} Ψ" for value in values]),
        (axes[1], left, keeps, states),
    ):
        most = max([*ends, *lines.values()])
        for place, (name, end, text) in enumerate(zip(names, ends, texts, strict=True)):
            at = (max(end, lines[name]), place)
            ax.annotate(text, at, (8, 0), textcoords="offset points", va="center")
        ax.set_yticks(places, names)
        ax.set(ylim=(len(names) - 0.4, -0.6), xlim=(0, 1.25 * most))
        ax.grid(axis="y", visible=False)
    axes[0].set_xlabel("sent by a rank in a step, Ψ")
    axes[1].set_xlabel("kept by a rank, bytes per parameter")
    handles, labels = axes[1].get_legend_handles_labels()
    handles += [Patch(color=COLOURS["communication"]), Patch(fill=False, edgecolor="black")]
    fig.legend(handles, [*labels, "sent", "the papers'"], loc="outside lower center", ncols=3)
    values_text = "; ".join(
        f"{name} sends {sent[name]:.2f} Ψ and keeps {left[k]:.1f} B" for k, name in enumerate(names)
    )
    return save(fig, "accelerate_configurations", f"A rank of each configuration: {values_text} per parameter.")


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
    fig, ax = new(size=(5.8, 2.6))
    places, values = np.arange(len(measured)), [of / 1e6 for of in measured.values()]
    ax.barh(places, values, 0.55, color=COLOURS["communication"], label="measured")
    outline = [expected[name] / 1e6 for name in measured]
    ax.barh(places, outline, 0.7, fill=False, edgecolor="black", linewidth=1.2, label="the papers'")
    for place, value in enumerate(values):
        at = (max(value, outline[place]), place)
        ax.annotate(f"{value:.2f} MB", at, (8, 0), textcoords="offset points", va="center")
    ax.set_yticks(places, list(measured))
    ax.set(
        xlabel="sent by rank 0 in a step, MB", xlim=(0, 1.25 * max(values + outline)), ylim=(len(measured) - 0.4, -0.6)
    )
    ax.grid(axis="y", visible=False)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    values_text = ", ".join(f"{name} {value:.2f} MB" for name, value in zip(measured, values, strict=True))
    return save(fig, "accelerate_groups", f"Sent by rank 0 in a step: {values_text}.")


def kept_against_sent(ways: Mapping[str, Sequence[tuple[float, float]]], counts: Sequence[int]) -> Picture:
    """What a rank keeps against what it sends in a step, a line for each configuration over numbers of micro-batches.

    Args:
        ways: configuration -> for each of ``counts``: Ψ sent, bytes per parameter kept.
        counts: micro-batches in a step.
    """
    fig, ax = new(size=(5.8, 3.9))
    styles = zip(
        ways,
        ("o", "s", "D", "^"),
        [CONFIGURATIONS[of] for of in ("DDP", "ZeRO-1", "ZeRO-2", "FSDP2")],
        strict=True,
    )
    for name, marker, colour in styles:
        sent, kept = zip(*ways[name], strict=True)
        ax.plot(sent, kept, color=palette.INK, linewidth=1.2, zorder=2)
        ax.scatter(sent, kept, s=90, marker=marker, color=colour, edgecolor=palette.INK, label=name, zorder=3)
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
