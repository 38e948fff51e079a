"""Pictures of *Accelerate*: one script under several configurations, and silent mistakes."""

from collections.abc import Mapping, Sequence

import numpy as np

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
    """Plots what each configuration of one script sends in a step, in Ψ, and keeps, in bytes per parameter.

    Outlines are the papers'.

    Args:
        sent, sends: counted and predicted, by configuration. kept: configuration -> kind -> bytes per parameter.
        keeps: predicted sums of the model states, so without what is "others".
    """
    series = {label: {name: kinds.get(kind, 0.0) for name, kinds in kept.items()} for kind, (label, _) in _KEPT.items()}
    texts = []
    for kinds in kept.values():
        more = kinds.get("others", 0.0)
        texts.append(f"{sum(kinds.values()) - more:.1f}" + (f" + {more:.1f}" if more > 0.2 else ""))
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
    first, last = ([curve[at] for curve, _ in runs.values()] for at in (0, -1))
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
        f"{name} from {curve[0]:.3f} to {curve[-1]:.3f}: {message or 'well'}" for name, (curve, message) in runs.items()
    )
    return save(
        fig,
        "accelerate_mistakes",
        f"The loss falls in every run, and an assertion says why it is wrong: {values_text}.",
    )
