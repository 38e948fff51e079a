"""Pictures of *Experts*: what is dropped, who waits, and how loads change while a model is trained."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.patches import Rectangle

from pardemo.draw import palette
from pardemo.draw.charts import bar_chart, bars, curves, words
from pardemo.draw.style import Picture, new, save


def dropped_tokens(shares: Mapping[float, float], losses: Mapping[float, float], without: float) -> Picture:
    """Plots what finds no room, in per cent of all assignments, and the loss, for each capacity factor.

    Args:
        shares, losses: by factor. without: the loss where nothing is dropped.
    """
    fig, axes = new(1, 2, size=(6.4, 3.2))
    labels = [f"{factor:g}" for factor in shares]
    dropped = dict(zip(labels, shares.values(), strict=True))
    bars(axes[0], {"dropped": dropped}, fills={"dropped": "activations"}, per=0.01, text="{:.0f}")
    axes[0].set(title="dropped, % of rows", xlabel="capacity factor")
    curves(axes[1], {"loss": dict(zip(labels, losses.values(), strict=True))}, colours=[palette.INK], marks="o")
    axes[1].axhline(without, color=palette.INK, linestyle="--", linewidth=1.2)
    axes[1].annotate("nothing dropped", (len(labels) - 0.8, without), (0, 8), textcoords="offset points", ha="right")
    axes[1].set(title="loss", xlabel="capacity factor")
    summary = "; ".join(f"factor {f:g}: {100 * shares[f]:.0f} % dropped, loss {losses[f]:.2f}" for f in shares)
    return save(fig, "experts_dropped", f"{summary}; loss {without:.2f} where nothing is dropped.")


def who_waits_for_experts(seconds: Mapping[str, Sequence[float]], predicted: Mapping[str, Sequence[float]]) -> Picture:
    """Seconds that each rank's experts compute, and that it then waits for the slowest, in a panel for each case.

    Args:
        seconds, predicted: case -> by rank; an outline is what the rank's rows predict.
    """
    panels = {
        case: {"series": {"experts compute": busy, "idle": [max(busy) - s for s in busy]},
               "outline": dict(enumerate(predicted[case]))}
        for case, busy in seconds.items()
    }  # fmt: skip
    summary = "; ".join(f"{case}: {', '.join(f'{1e3 * s:.1f}' for s in row)} ms" for case, row in seconds.items())
    return bar_chart(
        "experts_slowest", f"Experts of each rank compute {summary}; the others wait for the slowest.", panels,
        shared=True, stacked=True, per=1e-3, fills={"experts compute": "compute", "idle": ("wait", "")}, axis="rank",
        unit="ms", outlined="predicted by its rows", ncols=3, size=(6.4, 3.3), room=1.05,
    )  # fmt: skip


def loads_over_time(loads: Mapping[str, Sequence[Sequence[int]]], losses: Mapping[str, Sequence[float]]) -> Picture:
    """For each way to train: the experts' shares of all assignments over the steps, stacked; and the losses.

    Args:
        loads: way -> [steps][experts]. losses: way -> [steps].
    """
    fig, grid = new(2, 3, size=(6.4, 4.8))
    panels, ax_of_loss = grid[:, :2].flatten(), grid[1, 2]
    colours = [palette.RANKS[e % len(palette.RANKS)] for e in range(len(next(iter(loads.values()))[0]))]
    for index, (ax, (way, of_steps)) in enumerate(zip(panels, loads.items(), strict=False)):
        smooth = _smooth(np.asarray(of_steps, float))
        shares = 100 * smooth / smooth.sum(1, keepdims=True)
        ax.stackplot(range(len(shares)), shares.T, colors=colours, edgecolor=palette.INK, linewidth=0.3)
        ax.set(title=way, ylim=(0, 100), xlim=(0, len(shares) - 1))
        ax.grid(visible=False)
        if index % 2 == 0:
            ax.set_ylabel("experts' shares, %")
    curves(ax_of_loss, {way: _smooth(np.asarray(curve, float)[:, None])[:, 0] for way, curve in losses.items()})
    first = next(iter(losses.values()))
    ax_of_loss.set(title="loss", ylim=(None, first[len(first) // 8]))
    for ax in grid[1]:
        ax.set_xlabel("step")
    grid[0, 2].axis("off")
    grid[0, 2].legend(*ax_of_loss.get_legend_handles_labels(), loc="lower left", title="loss, below:")
    summary = words({way: np.mean(curve[-20:]) for way, curve in losses.items()}, "{:.2f}")
    return save(fig, "experts_loads", f"The experts' shares while a model is trained. Losses at the end: {summary}.")


def _smooth(values: np.ndarray, steps: int = 8) -> np.ndarray:
    """The mean of each value and of those before it, ``steps`` at most: [steps, ..]."""
    sums = np.cumsum(values, 0)
    counts = np.minimum(np.arange(1, len(values) + 1), steps)[:, None]
    sums[steps:] = sums[steps:] - sums[:-steps]
    return sums / counts


def rows_between_nodes(sent: Mapping[str, float], predicted: Mapping[str, float]) -> Picture:
    """MB that all nodes send each other, for each way to send rows."""
    return bar_chart(
        "experts_nodes", "MB between nodes: {}; outlines are predicted.",
        {"MB between nodes": {"series": {"communication": sent}, "outline": predicted}},
        text="{:.1f}", room=1.2, size=(5.0, 3.0),
    )  # fmt: skip


def groups_of_experts(
    dense: Sequence[Sequence[int]], experts: Sequence[Sequence[int]], replicas: Sequence[Sequence[int]], host: int
) -> Picture:
    """Two maps of the same ranks, a row for each node: groups of the dense layers, and of the layers with experts.

    Args:
        dense: tensor-parallel groups. experts: expert-parallel groups. replicas: groups with the same experts, which
            average these experts' gradients. host: ranks of a node.
    """
    size = max(map(max, experts)) + 1
    fig, axes = new(1, 2, size=(7.2, 0.36 * size / host + 1.5))
    panels = (
        ("dense layers", dense, "neighbours of one colour:\na tensor group"),
        ("layers with experts", experts, "a colour: an expert group;\nbold: the same experts"),
    )
    for ax, (title, groups, kind) in zip(axes, panels, strict=True):
        number = np.empty(size)
        for index, group in enumerate(groups):
            number[group] = index % len(palette.RANKS)
        grid = number.reshape(-1, host)
        ax.set(title=title, xlabel=kind, xticks=[], yticks=range(len(grid)))
        ax.grid(visible=False)
        for rank in range(size):
            y, x = divmod(rank, host)
            box = {"facecolor": palette.RANKS[int(number[rank])], "edgecolor": palette.INK, "linewidth": 0.7}
            ax.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, **box))
            bold = "bold" if ax is axes[1] and rank in replicas[0] else "normal"
            ax.text(x, y, str(rank), ha="center", va="center", color=palette.INK, fontweight=bold)
        ax.set(xlim=(-0.5, host - 0.5), ylim=(len(grid) - 0.5, -0.5))
    axes[0].set_ylabel("node")
    summary = f"{len(dense)} tensor groups of {len(dense[0])}, {len(experts)} expert groups of {len(experts[0])}"
    same = ", ".join(map(str, replicas[0]))
    return save(fig, "experts_groups", f"{summary}. Ranks {same}, in bold, have the same experts.")
