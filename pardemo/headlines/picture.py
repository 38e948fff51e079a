"""The picture of lengths: how long bodies and headlines are, in training and in test."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pardemo.draw.style import new, write


def lengths(chosen: Mapping[str, Sequence[bytes]], path: Path) -> None:
    """Writes histograms of the lengths of inputs and outputs, of each file one line, to ``path``.

    Args:
        chosen: file -> its rows, each a line of JSON.
    """
    fig, axes = new(1, 2, size=(9.0, 3.2))
    medians = []
    for ax, field in zip(axes, ("input", "output"), strict=True):
        sizes = {name: [len(json.loads(line)[field]) for line in lines] for name, lines in chosen.items()}
        top = max(max(of) for of in sizes.values())
        edges = np.arange(0, top + 2, max(1, top // 40))
        for (name, of), style in zip(sizes.items(), ("-", "--"), strict=True):
            share = np.histogram(of, np.append(edges, edges[-1] + 1))[0] / len(of) * 100
            ax.step(edges, share, where="post", linestyle=style, color="black", label=f"{name} ({len(of):,})")
            medians.append(f"{name} {field} {np.median(of):g}")
        ax.set(xlabel=f"{field}, characters", ylabel="rows, %")
        ax.legend()
    write(fig, path, f"Histograms of the lengths in characters; medians: {', '.join(medians)}.")
