"""Pictures of *Is it right?*: curves of versions, a map of right and wrong modules, a bug beside rounding."""

from collections.abc import Mapping, Sequence

import numpy as np

from pardemo.book.chapters.is_it_right.measurements import wrong
from pardemo.draw import palette
from pardemo.draw.charts import bar_chart, curves, key, patch
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
    names = [name.capitalize() for name in losses]
    looks = {"colours": [_OF_DAYS[name] for name in losses], "dashes": [_DASHES[name] for name in losses]}
    curves(axes[0], dict(zip(names, losses.values(), strict=True)), linewidth=1.1, **looks)
    away = [_smooth(np.subtract(values, losses[beside])) for values in losses.values()]
    curves(axes[1], {name: dict(enumerate(gap, _MEAN_OF - 1)) for name, gap in zip(names, away, strict=True)}, **looks)
    axes[0].set(ylabel="loss")
    reach = np.ptp(losses[beside][len(losses[beside]) // 2 :]) / 2  # as far as steps of one curve are apart
    axes[1].set(xlabel="step", ylabel=f"beside {beside.capitalize()}'s", ylim=(-reach, reach))
    key(fig, ncols=4)
    ends = ", ".join(f"{name} {np.mean(values[-_MEAN_OF:]):.3f}" for name, values in losses.items())
    return save(fig, "is_it_right_curves", f"Losses of the last {_MEAN_OF} steps, on average: {ends}.")


def gaps_beside_noise(gaps: Mapping[str, float], noise: float) -> Picture:
    """Plots how far wrong versions' losses are from the right one's, beside how far two steps of that one are apart."""
    rows = {name.capitalize(): gap for name, gap in gaps.items()} | {"from one step to the next": noise}
    colours = [*(_OF_DAYS[name] for name in gaps), palette.OTHER]
    return bar_chart(
        "is_it_right_gaps", "Differences of losses: {}.", {"difference of losses, mean": {"series": {"gap": rows}}},
        across=True, fills={"gap": colours}, text="{:.2g}", size=(6.0, 2.6),
    )  # fmt: skip


def map_of_modules(versions: Mapping[str, Mapping[str, tuple[float, float]]]) -> Picture:
    """Plots which modules have right gradients, and which have not, in each version, in the order of the backward pass.

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
    key(fig, patch("=  right", ("idle", "")), patch("≠  wrong, or its factor", "fails"))
    counts = {
        " ".join(version.split()): len({name.rpartition(".")[0] for name, pair in modules.items() if wrong(*pair)})
        for version, modules in versions.items()
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
    series = {"right: rounding alone": rounding, "with another ε": bug}
    return bar_chart(
        "is_it_right_precision", "The largest difference. {}.", {"difference, relative": {"series": series}},
        fills=dict(zip(series, (palette.OTHER, ("fails", "//")), strict=True)), text="{:.0e}", size=(6.0, 3.4),
        log_limits=(min(rounding.values()) / 10, 30 * max(*rounding.values(), *bug.values())),
    )  # fmt: skip
