"""Pictures of *Baichuan2: the plan*: a loss head's tensors, a step's course, rules beside the truth, operations."""

from collections.abc import Mapping, Sequence

import numpy as np

from pardemo.book.chapters.which_layout.figures import memory_of_layouts
from pardemo.draw import palette
from pardemo.draw.charts import bar_chart, key, words
from pardemo.draw.style import COLOURS, Picture, new, save

__all__ = ["course_of_step", "memory_of_layouts", "operations_of_step", "rules_and_truth", "tensors_of_head"]

SHADES = {**palette.KEPT, **palette.SHADES}
SMALL = 0.05  # of the largest tensor: what is less is not drawn


def tensors_of_head(events: Sequence[tuple[str, int]]) -> Picture:
    """A row for each tensor, from its birth to its death, as thick as it is large; below, what is alive together.

    Args:
        events: (the tensor's name, bytes) at its birth, (name, -bytes) at its death, in order of time.
    """
    most = max(nbytes for _, nbytes in events)
    large = [(name, nbytes / 1e9) for name, nbytes in events if abs(nbytes) > SMALL * most]
    births = [(name, at, size) for at, (name, size) in enumerate(large) if size > 0]
    deaths = {name: at for at, (name, size) in enumerate(large) if size < 0}
    fig, (ax, below) = new(2, 1, size=(6.4, 5.4), sharex=True, height_ratios=(2, 1))
    labels = []
    for row, (name, birth, size) in enumerate(births):
        ours = "empty" in name
        end = deaths.get(name, len(large))
        ax.barh(
            row, end - birth, 0.9 * size * 1e9 / most, left=birth, color=SHADES[("logits", "frozen parameters")[ours]]
        )
        labels.append(f"{'the head' if ours else name.split(' ', 1)[-1]}: {size:.1f} GB")
    ax.set_yticks(range(len(births)), labels)
    ax.set_ylim(len(births) - 0.4, -0.6)
    total = np.cumsum([size for _, size in large])
    top = int(total.argmax())
    for axes in (ax, below):
        axes.axvspan(top, top + 1, color=palette.OTHER, alpha=0.3, linewidth=0)
        axes.grid(axis="x", visible=False)
    middle = next((at for name, at, _ in births if "backward" in name), 0)
    for axes in (ax, below) if middle else ():
        axes.axvline(middle, color="black", linewidth=1.0, linestyle=":")
    for at, word in ((middle / 2, "forward"), ((middle + len(large)) / 2, "backward")) if middle else ():
        below.annotate(word, (at, 1.36 * total[top]), ha="center", va="center")
    below.stairs(total, range(len(large) + 1), fill=True, color=SHADES["logits"])
    below.annotate(f"{total[top]:.1f}", (top + 0.5, total[top]), (0, 3), textcoords="offset points", ha="center")
    below.set(xlabel="allocations and frees", ylabel="GB alive", ylim=(0, 1.5 * total[top]))
    below.set_xticks([])
    return save(fig, "baichuan2_plan_head", f"{', '.join(labels)}; together {total[top]:.1f} GB at most.")


def course_of_step(footprint) -> Picture:
    """GB by kind over a step's allocations and frees; below, the events around the peak seen closer.

    Args:
        footprint: a :class:`~pardemo.planner.dry_run.footprint.Footprint`.
    """
    share = footprint.timeline.astype(float) / 1e9
    total, kinds = share.sum(1), list(footprint.lines)
    near = np.flatnonzero(share[:, kinds.index("logits")])
    begin, end, top = max(int(near[0]) - 8, 0), min(int(near[-1]) + 10, len(total)), int(total.argmax())
    floor = 0.94 * share[0].sum()
    backward = dict(footprint.phases)["backward"]
    fig, (ax, close) = new(2, 1, size=(6.4, 7.2))
    for axes, first, last in ((ax, 0, len(total)), (close, begin, end)):
        colours = [SHADES[kind] for kind in kinds]
        axes.stackplot(range(first, last), share[first:last].T, colors=colours, labels=kinds, step="post", lw=0)
        for middle, word in (((first + backward) / 2, "forward"), ((backward + last) / 2, "backward")):
            axes.annotate(word, (middle, floor + 1.21 * (total[top] - floor)), ha="center", va="center")
        axes.set(ylim=(floor, floor + 1.3 * (total[top] - floor)))
        axes.set_ylabel(f"GB; the axis begins at {floor:.0f}")
        axes.margins(x=0)
        axes.axvline(backward, color="black", linewidth=1.0, linestyle=":")
    ax.plot([top], [total[top]], "v", color=SHADES["logits"], markersize=7)  # the tower is narrower than a pixel
    at_top = f"{total[top]:.1f} GB, logits {share[top, kinds.index('logits')]:.1f}"
    ax.annotate(at_top, (top, total[top]), (9, 0), textcoords="offset points", va="center")
    close.annotate(f"{total[top]:.1f} GB", (top, total[top]), (0, 4), textcoords="offset points", weight="bold")
    ax.set(title="the whole step", xlabel="allocations and frees")
    close.set(title="its tower seen closer: head and loss", xlabel="the same events")
    handles, labels = ax.get_legend_handles_labels()
    visible = [k for k in range(len(kinds)) if share[:, k].max() >= 0.2]
    fig.legend([handles[k] for k in visible], [labels[k] for k in visible], loc="outside lower center", ncols=2)
    sizes = words({kind: nbytes for kind, nbytes in footprint.lines.items() if nbytes > 1e8}, "{:.1f}", per=1e9)
    alt = f"GB over one step of the 13B; at the peak of {total[top]:.1f} GB: {sizes}."
    return save(fig, "baichuan2_plan_step", alt)


def rules_and_truth(errors: Mapping[str, Mapping[str, float]]) -> Picture:
    """Plots how far each rule is from the measured peak, in per cent: ``job -> rule -> share``; black is no error."""
    fig, ax = new(size=(6.2, 0.85 * len(errors) + 1.5))
    rules = list(dict.fromkeys(rule for by_rule in errors.values() for rule in by_rule))
    styles = dict(zip(rules, (("holds", ""), ("off", "///"), ("differs", "...")), strict=False))
    high = 0.8 / len(rules)
    for row, by_rule in enumerate(errors.values()):
        for index, rule in enumerate(rules):
            if rule not in by_rule:
                continue
            colour, hatch = styles[rule]
            at, value = row + (index - (len(rules) - 1) / 2) * high, 100 * by_rule[rule]
            label = rule if rule not in ax.get_legend_handles_labels()[1] else None
            if abs(value) < 1:  # no bar would be seen
                ax.plot([value], [at], "D", color=COLOURS[colour], markersize=8, linestyle="", label=label, zorder=3)
            else:
                ax.barh(at, value, high, color=COLOURS[colour], hatch=hatch, edgecolor="white", label=label)
            text = f"{value:+.0f}" if abs(value) >= 1 else "0.0" if abs(value) < 0.05 else f"{value:+.1f}"
            text = text.replace("-", "−")  # as the axis writes it
            side = {"ha": "left" if value >= 0 else "right", "va": "center"}
            away = 4 if abs(value) >= 1 else 9
            ax.annotate(text, (value, at), (away if value >= 0 else -away, 0), textcoords="offset points", **side)
    ax.axvline(0, color="black", linewidth=1.2)
    ax.set_yticks(range(len(errors)), list(errors))
    low, most = (100 * end(v for by_rule in errors.values() for v in by_rule.values()) for end in (min, max))
    ax.set(xlabel="per cent off the measured peak", ylim=(len(errors) - 0.4, -0.6))
    ax.set_xlim(min(low, 0) - 0.14 * (most - low), most + 0.14 * (most - low))
    ax.grid(axis="y", visible=False)
    key(fig)
    summary = words(errors, "{:+.0f} %", per=0.01)
    return save(fig, "baichuan2_plan_truth", f"Peaks of small models, planned against measured: {summary}.")


def operations_of_step(steps: Mapping[str, Mapping[str, float]]) -> Picture:
    """Operations of a micro-batch by phase, in units of 10¹²; ``recomputation`` is the forward pass again."""
    fills = {"forward": "forward", "recomputation": ("forward", "///"), "backward": "backward"}
    series = {phase: {way: phases.get(phase, 0.0) for way, phases in steps.items()} for phase in fills}
    return bar_chart(
        "baichuan2_plan_operations", "10¹² operations of a micro-batch: {}.",
        {"10¹² operations for 8 × 1,024 tokens": {"series": series}}, across=True, stacked=True, per=1e12, fills=fills,
        text="{:.0f}", ncols=3,
    )  # fmt: skip
