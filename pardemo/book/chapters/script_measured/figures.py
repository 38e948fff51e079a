"""Pictures of *A script, measured*: bytes by line, memory by kind, seconds by what a rank does, seconds on GPUs."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.patches import Patch

from pardemo.draw import palette
from pardemo.draw.style import COLOURS, Picture, new, save

_SUMS, _LOGITS = "gradients, summed", "logits, gathered"
_SENT = {_SUMS: (COLOURS["gradients"], ""), _LOGITS: (palette.SHADES["logits"], "//")}
_HELD = {
    "parameters": (COLOURS["parameters"], ""),
    "gradients": (COLOURS["gradients"], "//"),
    "optimizer states": (COLOURS["optimizer states"], ".."),
    "activations": (COLOURS["activations"], ""),
    "communication buffers": (palette.SHADES["buckets"], ""),
    "logits": (palette.SHADES["logits"], ""),
    "gathered": (palette.SHADES["logits"], "//"),
}
_HELD_LABELS = {"communication buffers": "DDP's buckets", "logits": "a rank's logits", "gathered": "all ranks' logits"}
_TIMES = {
    "waits for bytes": (COLOURS["communication"], ""),
    "computes": (COLOURS["compute"], ""),
    "waits for ranks": (COLOURS["wait"], "..."),
}


def sent_by_line(sums: Mapping[str, float], logits: Mapping[str, float], must: float) -> Picture:
    """MB that a rank sends in a step of each version of the script, by what it sends; outlines are the formula.

    Args:
        sums, logits: version -> bytes of the two lines. must: bytes by the formula.
    """
    names = list(sums)
    fig, ax = new(size=(6.0, 1.3 + 0.62 * len(names)))
    left = np.zeros(len(names))
    for name, values in ((_SUMS, sums), (_LOGITS, logits)):
        parts = np.array([values[version] for version in names]) / 1e6
        colour, hatch = _SENT[name]
        ax.barh(range(len(names)), parts, 0.55, left=left, color=colour, hatch=hatch, edgecolor="white", label=name)
        left += parts
    outline = {"fill": False, "edgecolor": COLOURS["predicted"], "linewidth": 1.4, "label": "the formula"}
    ax.barh(range(len(names)), [must / 1e6] * len(names), 0.72, **outline)
    for place, end in enumerate(left):
        ax.annotate(f"{1e6 * end / must:.2f} ×", (end, place), (8, 0), textcoords="offset points", va="center")
    ax.set_yticks(range(len(names)), names)
    ax.set(xlabel="sent by a rank in a step, MB", xlim=(0, 1.15 * max(left)), ylim=(len(names) - 0.4, -0.6))
    ax.grid(axis="y", visible=False)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    values_text = "; ".join(
        f"{n} {sums[n] / 1e6:.2f} + {logits[n] / 1e6:.2f}, {1e6 * end / must:.2f} times the formula"
        for n, end in zip(names, left, strict=True)
    )
    return save(
        fig, "script_measured_sent", f"MB of gradients and of logits that a rank sends in a step: {values_text}."
    )


def held_at_the_peak(kinds: Mapping[str, Mapping[str, float]]) -> Picture:
    """MB that a rank holds at the peak of a step of each version of the script, by kind."""
    names = list(kinds)
    shown = [kind for kind in _HELD if any(of.get(kind) for of in kinds.values())]
    rest = {name: sum(n for kind, n in of.items() if kind not in _HELD) for name, of in kinds.items()}
    fig, ax = new(size=(6.0, 2.3 + 0.62 * len(names)))
    left = np.zeros(len(names))
    for kind in shown:
        parts = np.array([kinds[name].get(kind, 0.0) for name in names]) / 1e6
        colour, hatch = _HELD[kind]
        label = _HELD_LABELS.get(kind, kind)
        ax.barh(range(len(names)), parts, 0.55, left=left, color=colour, hatch=hatch, edgecolor="white", label=label)
        left += parts
    if max(rest.values()) > 1e5:
        parts = np.array(list(rest.values())) / 1e6
        ax.barh(range(len(names)), parts, 0.55, left=left, color=palette.OTHER, edgecolor="white", label="others")
        left += parts
    for place, end in enumerate(left):
        ax.annotate(f"{end:.1f}", (end, place), (6, 0), textcoords="offset points", va="center")
    ax.set_yticks(range(len(names)), names)
    ax.set(xlabel="held by a rank at the peak, MB", xlim=(0, 1.12 * max(left)), ylim=(len(names) - 0.4, -0.6))
    ax.grid(axis="y", visible=False)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    values_text = "; ".join(
        f"{name} {end:.1f}: " + ", ".join(f"{_HELD_LABELS.get(k, k)} {kinds[name].get(k, 0) / 1e6:.1f}" for k in shown)
        for name, end in zip(names, left, strict=True)
    )
    return save(fig, "script_measured_held", f"MB at the peak, by kind: {values_text}.")


def step_by_parts(parts: Mapping[str, Mapping[str, float]], predicted: Mapping[str, float]) -> Picture:
    """Milliseconds of a step by what a rank does: waits for bytes, computes, waits for ranks.

    Args:
        parts: run -> what the rank does -> seconds. predicted: run -> seconds that it waits for bytes by the formula;
            outlines, where there is a link to predict with.
    """
    names = list(parts)
    fig, ax = new(size=(6.0, 1.8 + 0.62 * len(names)))
    left = np.zeros(len(names))
    for what, (colour, hatch) in _TIMES.items():
        width = np.array([1e3 * parts[name][what] for name in names])
        ax.barh(range(len(names)), width, 0.55, left=left, color=colour, hatch=hatch, edgecolor="white", label=what)
        left += width
    for name, seconds in predicted.items():
        ax.barh(names.index(name), 1e3 * seconds, 0.72, fill=False, edgecolor=COLOURS["predicted"], linewidth=1.4)
    for place, end in enumerate(left):
        ax.annotate(f"{end:.0f}", (end, place), (6, 0), textcoords="offset points", va="center")
    ax.set_yticks(range(len(names)), names)
    ax.set(xlabel="milliseconds of a step", xlim=(0, 1.12 * max(left)), ylim=(len(names) - 0.4, -0.6))
    ax.grid(axis="y", visible=False)
    handles, labels = ax.get_legend_handles_labels()
    handles.append(Patch(fill=False, edgecolor=COLOURS["predicted"]))
    fig.legend(handles, [*labels, "bytes over bandwidth"], loc="outside lower center", ncols=2)
    values_text = "; ".join(
        f"{name} " + ", ".join(f"{what} {1e3 * parts[name][what]:.0f}" for what in _TIMES) for name in names
    )
    return save(fig, "script_measured_seconds", f"Milliseconds of a step: {values_text}.")


def two_losses(losses: Mapping[str, Sequence[float]]) -> Picture:
    """The loss of each step, as rank 0 logs it, of a right version of the script and of one whose ranks train alone."""
    fig, ax = new(size=(6.0, 3.2))
    for (name, values), marker, verdict in zip(losses.items(), ("o", "s"), ("holds", "fails"), strict=True):
        ax.plot(range(len(values)), values, marker=marker, color=COLOURS[verdict], label=name, markersize=8)
    ax.set(xlabel="step", ylabel="loss, rank 0")
    ax.set_xticks(range(max(map(len, losses.values()))))
    ax.legend(loc="upper right")
    values_text = "; ".join(f"{name} " + ", ".join(f"{n:.3f}" for n in of) for name, of in losses.items())
    return save(fig, "script_measured_losses", f"The loss of each step falls in both: {values_text}.")


def steps_on_gpus(networks: Mapping[str, Mapping[str, Sequence[float]]]) -> Picture:
    """Seconds of a step on GPUs: computed, and waited for sums of gradients and for logits; one panel a network.

    Args:
        networks: network -> version of the script -> seconds that it computes, waits for sums, waits for logits.
    """
    fig, axes = new(len(networks), 1, size=(6.0, 0.9 + 1.75 * len(networks)), squeeze=False)
    kinds = (("computes", COLOURS["compute"], ""), *((name, *_SENT[name]) for name in _SENT))
    for ax, (network, versions) in zip(axes[:, 0], networks.items(), strict=True):
        names, left = list(versions), np.zeros(len(versions))
        for at, (label, colour, hatch) in enumerate(kinds):
            width = np.array([versions[name][at] for name in names])
            ax.barh(range(len(names)), width, 0.6, left=left, color=colour, hatch=hatch, edgecolor="white", label=label)
            left += width
        for place, end in enumerate(left):
            ax.annotate(f"{end:.2f}", (end, place), (6, 0), textcoords="offset points", va="center")
        ax.set_yticks(range(len(names)), names)
        ax.set(title=network, xlim=(0, 1.15 * max(left)), ylim=(len(names) - 0.4, -0.6))
        ax.grid(axis="y", visible=False)
    axes[-1, 0].set_xlabel("seconds of a step")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    values_text = "; ".join(
        f"{network}: " + ", ".join(f"{name} {sum(of):.2f}" for name, of in versions.items())
        for network, versions in networks.items()
    )
    return save(fig, "script_measured_gpus", f"Seconds of a step by network and version. {values_text}.")
