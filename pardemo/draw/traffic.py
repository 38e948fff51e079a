"""Who sends how much to whom: a square for each pair of ranks, nodes marked."""

from collections.abc import Sequence

import numpy as np

from pardemo import extras
from pardemo.cluster import Cluster
from pardemo.draw.style import new

with extras.needed_by(__name__):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle


def traffic(
    matrix: Sequence[Sequence[float]], cluster: Cluster, unit_bytes: float = 2**20, unit: str = "MiB"
) -> Figure:
    """Bytes from each rank (rows) to each other one (columns), as numbers and shades; a frame around each node."""
    values = np.asarray(matrix, dtype=float) / unit_bytes
    side = max(3.6, 0.62 * len(values))
    fig, ax = new(size=(side + 0.6, side))
    square(ax, values, cluster, float(values.max()))
    ax.set(xlabel="to rank", ylabel="from rank", title=f"{unit} sent; frames: nodes")
    return fig


def square(ax: Axes, values: np.ndarray, cluster: Cluster, most: float, size: float = 10) -> None:
    """A figure for each pair of ranks on a shade up to ``most``, and a frame around each node."""
    ax.imshow(values, cmap="Oranges", vmin=0, vmax=max(most, 1e-12))
    for sender, row in enumerate(values):
        for receiver, value in enumerate(row):
            if sender != receiver and value >= 0.005 * most:
                colour = "white" if value > 0.6 * most else "black"
                ax.text(receiver, sender, f"{value:.3g}", ha="center", va="center", color=colour, fontsize=size)
    for host in range(cluster.hosts):
        first, many = cluster.ranks_of(host)[0], cluster.ranks_per_host
        ax.add_patch(Rectangle((first - 0.5, first - 0.5), many, many, fill=False, edgecolor="black", linewidth=1.6))
    ax.set_xticks(range(len(values)))
    ax.set_yticks(range(len(values)))
    ax.grid(visible=False)
