"""Pictures of *Is it right?*: curves of versions, a map of right and wrong modules, a bug beside rounding."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.patches import Patch

from pardemo.book.chapters.is_it_right.measurements import wrong
from pardemo.draw import palette
from pardemo.draw.style import COLOURS, Picture, new, save

_OF_DAYS = dict(zip(("monday", "tuesday", "wednesday", "thursday"), palette.WAYS.values(), strict=True))
_DASHES = dict(zip(_OF_DAYS, ("-", "--", "-.", ":"), strict=True))
_MEAN_OF = 20  # steps


def _smooth(values: Sequence[float]) -> np.ndarray:
    """The mean of each step and those before it, over so many steps."""
    return np.convolve(values, np.ones(_MEAN_OF) / _MEAN_OF, mode="valid")


def four_curves(losses: Mapping[str, Sequence[float]], beside: str = "wednesday") -> Picture:
    """The loss of each step of each version, and below how far each is from one of them, as a mean over 20 steps."""
    fig, axes = new(2, 1, size=(6.2, 5.2), sharex=True)
    for name, values in losses.items():
        style = {"color": _OF_DAYS[name], "linestyle": _DASHES[name], "label": name.capitalize()}
        axes[0].plot(values, linewidth=1.1, **style)
        away = _smooth(np.subtract(values, losses[beside]))
        axes[1].plot(range(_MEAN_OF - 1, len(values)), away, linewidth=1.8, **style)
    axes[0].set(ylabel="loss")
    reach = np.ptp(losses[beside][len(losses[beside]) // 2 :]) / 2  # as far as steps of one curve are apart
    axes[1].set(xlabel="step", ylabel=f"beside {beside.capitalize()}'s", ylim=(-reach, reach))
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    ends = ", ".join(f"{name} {np.mean(values[-_MEAN_OF:]):.3f}" for name, values in losses.items())
    return save(fig, "is_it_right_curves", f"Losses of the last {_MEAN_OF} steps, on average: {ends}.")


def gaps_beside_noise(gaps: Mapping[str, float], noise: float) -> Picture:
    """How far wrong versions' losses are from the right one's, beside how far two steps of that one are apart."""
    names = [*(name.capitalize() for name in gaps), "from one step\nto the next"]
    values = [*gaps.values(), noise]
    fig, ax = new(size=(6.0, 2.6))
    colours = [*(_OF_DAYS[name] for name in gaps), palette.OTHER]
    ax.barh(range(len(names)), values, 0.6, color=colours, hatch=["", "", "", "//"], edgecolor="white")
    for place, value in enumerate(values):
        ax.annotate(f"{value:.2g}", (value, place), (6, 0), textcoords="offset points", va="center")
    ax.set_yticks(range(len(names)), names)
    ax.set(xlabel="difference of losses, mean", xlim=(0, 1.15 * max(values)), ylim=(len(names) - 0.4, -0.6))
    ax.grid(axis="y", visible=False)
    texts = ", ".join(f"{name} {value:.2g}" for name, value in gaps.items())
    return save(fig, "is_it_right_gaps", f"Differences of losses: {texts}; from one step to the next {noise:.2g}.")


def map_of_modules(versions: Mapping[str, Mapping[str, tuple[float, float]]]) -> Picture:
    """Which modules have right gradients, and which have not, in each version, in the order of the backward pass.

    Args:
        versions: version -> parameter -> factor and rest.
    """
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in next(iter(versions.values()))))
    order = [*reversed(modules)]
    names = list(versions)
    fig, ax = new(size=(5.8, 6.4))
    for column, version in enumerate(names):
        for row, module in enumerate(order):
            pairs = [pair for name, pair in versions[version].items() if name.rpartition(".")[0] == module]
            parted = [pair for pair in pairs if wrong(*pair)]
            colour = COLOURS["fails"] if parted else COLOURS["idle"]
            ax.barh(row, 0.9, 0.86, left=column - 0.45, color=colour)
            ax.text(column, row, _said(parted), ha="center", va="center", fontsize=10.5, color=palette.ink_on(colour))
    ax.set_xticks(range(len(names)), [name.capitalize() for name in names], fontsize=10.5)
    ax.set_yticks(range(len(order)), order)
    ax.xaxis.tick_top()
    ax.set(xlim=(-0.5, len(names) - 0.5), ylim=(len(order) - 0.5, -0.5), ylabel="the backward pass runs downwards")
    ax.grid(visible=False)
    ax.tick_params(length=0)
    fig.legend(
        handles=[
            Patch(color=COLOURS["idle"], label="=  right"),
            Patch(color=COLOURS["fails"], label="≠  wrong, or its factor"),
        ],
        loc="outside lower center",
        ncols=2,
    )
    counts = {
        " ".join(version.split()): len({name.rpartition(".")[0] for name, pair in of.items() if wrong(*pair)})
        for version, of in versions.items()
    }
    texts = "; ".join(f"{version}: {count}" for version, count in counts.items())
    return save(fig, "is_it_right_map", f"Modules with wrong gradients, of {len(order)}: {texts}.")


def _said(parted: Sequence[tuple[float, float]]) -> str:
    """What stands in a cell: a factor, where it explains all."""
    if not parted:
        return "="
    factors = {f"{factor:.3g}" for factor, _ in parted}
    return f"× {factors.pop()}" if len(factors) == 1 and not any(wrong(1, rest) for _, rest in parted) else "≠"


def bug_beside_rounding(rounding: Mapping[str, float], bug: Mapping[str, float]) -> Picture:
    """The largest difference of a gradient in each type: of right ranks, and of ranks with a bug."""
    names = list(rounding)
    fig, ax = new(size=(6.0, 3.4))
    for shift, values, colour, hatch, label in (
        (-0.2, rounding, palette.OTHER, "", "right: rounding alone"),
        (0.2, bug, COLOURS["fails"], "//", "with another ε"),
    ):
        places = np.arange(len(names)) + shift
        ax.bar(
            places, [values[name] for name in names], 0.38, color=colour, hatch=hatch, edgecolor="white", label=label
        )
        for place, name in zip(places, names, strict=True):
            ax.annotate(f"{values[name]:.0e}", (place, values[name]), (0, 4), textcoords="offset points", ha="center")
    ax.set_yscale("log")
    ax.set_xticks(range(len(names)), names)
    largest = max(*rounding.values(), *bug.values())
    ax.set(ylabel="difference, relative", ylim=(min(rounding.values()) / 10, 30 * largest))
    ax.grid(axis="x", visible=False)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    texts = "; ".join(f"{name} {rounding[name]:.0e} and {bug[name]:.0e}" for name in names)
    return save(fig, "is_it_right_precision", f"Rounding, and the bug: {texts}.")
