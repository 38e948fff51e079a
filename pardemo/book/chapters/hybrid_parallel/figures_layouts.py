"""Pictures of *Hybrid parallelism*: strong scaling, what each kind of layout adds, which layouts the rule takes."""

from collections.abc import Mapping, Sequence

import numpy as np

from pardemo.draw import palette
from pardemo.draw.rule import PARTS, what_each_adds
from pardemo.draw.style import COLOURS, Picture, new, save
from pardemo.planner.layouts.choice.procedure import Candidate, taken_of

#: Dimension -> the field of a layout, and its colour in the drawing of the cube; there the pipeline has the page's own.
_DIMENSIONS = {
    "tensor, t": ("tp", COLOURS["activations"]),
    "stages, p": ("pp", palette.OTHER),
    "replicas, d": ("dp", COLOURS["gradients"]),
}


def strong_scaling(planned: Mapping[int, float], paper: Mapping[int, float]) -> Picture:
    """Strong scaling: how many times as fast as one GPU t GPUs are, by the planner and in the paper."""
    fig, ax = new(size=(5.8, 3.2))
    sizes = [1, *planned]
    ax.plot(sizes, sizes, ":", color=palette.OTHER, linewidth=1.6, label="t times as fast")
    ax.plot(sizes, [1, *planned.values()], color=palette.PREDICTED, linewidth=1.6, label="the planner")
    ax.scatter([1, *paper], [1, *paper.values()], s=46, color=COLOURS["compute"], zorder=3, label="the paper")
    for t, value in paper.items():
        ax.annotate(f"{value:g}", (t, value), (0, -14), textcoords="offset points", ha="center")
    for t, value in planned.items():
        ax.annotate(f"{value:.1f}", (t, value), (9, -6), textcoords="offset points", ha="left")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_ticks(sizes, sizes)
    ax.minorticks_off()
    ax.set(xlabel="GPUs that share the 1.2B model, t", ylabel="times as fast as one")
    ax.set(xlim=(0.9, 10), ylim=(0.8, 10))
    ax.legend(loc="upper left")
    values_text = "; ".join(f"{t} GPUs {value:.2f}, paper {paper[t]:g}" for t, value in planned.items())
    return save(fig, "hybrid_parallel_strong", f"Times as fast as one GPU, by the planner: {values_text}.")


def kinds_of_layouts(fitting: Sequence[Candidate], job: str) -> Picture:
    """What the best layout of each kind adds to the time of the multiplications.

    A kind is what the replicas share, where no layer is cut; else which cuts there are.

    Args:
        fitting: what fits, the one that adds least first. job: in words.
    """
    kinds: dict[tuple, Candidate] = {}
    for candidate in fitting:
        layout = candidate.layout
        uncut = layout.tp == layout.pp == 1
        key = (layout.sharding, layout.shard_group) if uncut else (layout.tp > 1, layout.pp > 1)
        kinds.setdefault(key, candidate)
    taken = taken_of(fitting)
    shown = {_kind(one): one.adds for one in kinds.values()} | {_kind(taken): taken.adds}
    return what_each_adds(dict(sorted(shown.items(), key=_total)), "hybrid_parallel_kinds", _kind(taken), job)


def _total(item: tuple[str, Mapping[str, float]]) -> float:
    return sum(item[1].values())


def _kind(candidate: Candidate) -> str:
    return candidate.kind + (", recomputed" if candidate.layout.recompute == "full" else "")


def chosen_layouts(chosen: Mapping[str, Candidate]) -> Picture:
    """For each job what the rule's layout adds, and how its GPUs are split.

    Args:
        chosen: job -> what the rule takes.
    """
    fig, (left, right) = new(1, 2, size=(6.8, 0.52 * len(chosen) + 2.0), sharey=True, width_ratios=(1, 2))
    places, ends = np.arange(len(chosen)), np.zeros(len(chosen))
    for part, (label, colour, hatch) in PARTS.items():
        values = np.array([100 * one.adds[part] for one in chosen.values()])
        if values.any():
            left.barh(
                places, values, 0.58, left=ends, color=colour, hatch=hatch, edgecolor="white", label=f"{label} adds"
            )
        ends += values
    for place, end in zip(places, ends, strict=True):
        left.annotate(f"{end:.0f} %", (end, place), (4, 0), textcoords="offset points", va="center")
    left.set(xlabel="added, %", xlim=(0, 1.6 * max(ends.max(), 1)))
    ends = np.zeros(len(chosen))
    for name, (field, colour) in _DIMENSIONS.items():
        sizes = [getattr(one.layout, field) for one in chosen.values()]
        wide = np.log2(sizes)
        right.barh(places, wide, 0.58, left=ends, color=colour, edgecolor="white", label=name)
        for place, (size, begin, length) in enumerate(zip(sizes, ends, wide, strict=True)):
            if size > 1:
                style = {"ha": "center", "va": "center", "color": palette.ink_on(colour)}
                text = f"{name[-1]} {size}" if size > 2 else "2"  # its box is too narrow for the letter
                right.text(begin + length / 2, place, text, **style)
        ends += wide
    for place, (end, one) in enumerate(zip(ends, chosen.values(), strict=True)):
        shared = one.kind.rsplit(", ", 1)[-1] if one.layout.dp > 1 else "one replica"
        text = shared + ("\nrecomputed" if one.layout.recompute == "full" else "")
        right.annotate(text, (end, place), (5, 0), textcoords="offset points", va="center")
    ticks = range(0, int(ends.max()) + 1, 3)
    right.set_xticks(list(ticks), [f"{2**tick:,}" for tick in ticks])
    right.set(xlabel="GPUs", xlim=(0, 1.6 * ends.max()))
    left.set_yticks(places, [",\n".join(name.rsplit(", ", 1)) for name in chosen])
    left.set_ylim(len(chosen) - 0.5, -0.5)
    for ax in (left, right):
        ax.grid(axis="y", visible=False)
    handles, labels = (
        [*a, *b] for a, b in zip(left.get_legend_handles_labels(), right.get_legend_handles_labels(), strict=True)
    )
    fig.legend(handles, labels, loc="outside lower center", ncols=3)
    layouts_text = "; ".join(f"{name}: {one.layout}, adds {one.added:.0%}" for name, one in chosen.items())
    return save(fig, "hybrid_parallel_chosen", f"Layouts that the rule takes. {layouts_text}.")
