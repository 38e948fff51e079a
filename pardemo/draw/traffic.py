"""Who sends how much to whom: a square for each pair of ranks, nodes marked."""

import numpy as np

from pardemo import extras
from pardemo.cluster import Cluster

with extras.needed_by(__name__):
    from matplotlib.axes import Axes
    from matplotlib.patches import Rectangle


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
