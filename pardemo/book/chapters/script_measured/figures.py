"""Pictures of *A script, measured*: bytes by line, memory by kind, seconds by what a rank does, seconds on GPUs."""

from collections.abc import Mapping, Sequence

from pardemo.draw import palette
from pardemo.draw.charts import bar_chart, line_chart, words
from pardemo.draw.style import Picture

_SENT = {"gradients, summed": ("gradients", ""), "logits, gathered": ("logits", "//")}
#: What a rank holds -> its label, and how it is filled.
_HELD = {
    "parameters": ("parameters", "parameters"),
    "gradients": ("gradients", ("gradients", "//")),
    "optimizer states": ("optimizer states", ("optimizer states", "..")),
    "activations": ("activations", "activations"),
    "communication buffers": ("DDP's buckets", "buckets"),
    "logits": ("a rank's logits", "logits"),
    "gathered": ("all ranks' logits", ("logits", "//")),
}
_TIMES = {"waits for bytes": ("communication", ""), "computes": "compute", "waits for ranks": "wait"}


def sent_by_line(sums: Mapping[str, float], logits: Mapping[str, float], must: float) -> Picture:
    """MB that a rank sends in a step of each version of the script, by what it sends; outlines are the formula.

    Args:
        sums, logits: version -> bytes of the two lines. must: bytes by the formula.
    """
    times = {version: f"{(sums[version] + logits[version]) / must:.2f}" for version in sums}
    summary = "; ".join(
        f"{version} {sums[version] / 1e6:.2f} + {logits[version] / 1e6:.2f}, {lines} times the formula"
        for version, lines in times.items()
    )
    return bar_chart(
        "script_measured_sent", f"MB of gradients and of logits that a rank sends in a step: {summary}.",
        {"sent by a rank in a step, MB": {
            "series": dict(zip(_SENT, (sums, logits), strict=True)), "outline": dict.fromkeys(sums, must)}},
        across=True, stacked=True, per=1e6, fills=_SENT, text=[f"{lines} ×" for lines in times.values()],
        outlined="the formula",
    )  # fmt: skip


def held_at_the_peak(kinds: Mapping[str, Mapping[str, float]]) -> Picture:
    """MB that a rank holds at the peak of a step of each version of the script, by kind."""
    series = {label: {name: by.get(kind, 0.0) for name, by in kinds.items()} for kind, (label, _) in _HELD.items()}
    others = {name: sum(n for kind, n in by.items() if kind not in _HELD) for name, by in kinds.items()}
    fills = dict(_HELD.values())
    if max(others.values()) > 1e5:
        series["others"], fills["others"] = others, palette.OTHER
    shown = {label: by for label, by in series.items() if any(by.values())}
    return bar_chart(
        "script_measured_held", f"MB at the peak: {{}}; by kind: {words(shown, '{:.1f}', per=1e6)}.",
        {"held by a rank at the peak, MB": {"series": series}}, across=True, stacked=True, per=1e6, fills=fills,
        text="{:.1f}",
    )  # fmt: skip


def step_by_parts(parts: Mapping[str, Mapping[str, float]], predicted: Mapping[str, float]) -> Picture:
    """Milliseconds of a step by what a rank does: waits for bytes, computes, waits for ranks.

    Args:
        parts: run -> what the rank does -> seconds. predicted: run -> seconds that it waits for bytes by the formula;
            outlines, where there is a link to predict with.
    """
    series = {part: {run: seconds[part] for run, seconds in parts.items()} for part in _TIMES}
    return bar_chart(
        "script_measured_seconds", f"Milliseconds of a step: {words(series, '{:.0f}', per=1e-3)}.",
        {"milliseconds of a step": {"series": series, "outline": predicted}}, across=True, stacked=True, per=1e-3,
        fills=_TIMES, text="{:.0f}", outlined="bytes over bandwidth",
    )  # fmt: skip


def two_losses(losses: Mapping[str, Sequence[float]]) -> Picture:
    """The loss of each step, as rank 0 logs it, of a right version of the script and of one whose ranks train alone."""
    return line_chart(
        "script_measured_losses", f"The loss of each step falls in both: {words(losses, '{:.3f}')}.", losses,
        size=(6.0, 3.2), x="step", y="loss, rank 0", colours=("holds", "fails"), dashes=["-"], marks="os", markersize=8,
        bottom=None,
    )  # fmt: skip


def steps_on_gpus(networks: Mapping[str, Mapping[str, Sequence[float]]]) -> Picture:
    """Seconds of a step on GPUs: computed, and waited for sums of gradients and for logits; one panel a network.

    Args:
        networks: network -> version of the script -> seconds that it computes, waits for sums, waits for logits.
    """
    fills = {"computes": "compute", **_SENT}
    panels = {
        network: {"series": {kind: {name: row[at] for name, row in versions.items()} for at, kind in enumerate(fills)}}
        for network, versions in networks.items()
    }
    return bar_chart(
        "script_measured_gpus", "Seconds of a step by network and version. {}.", panels, across=True, stacked=True,
        fills=fills, text="{:.2f}", unit="seconds of a step",
    )  # fmt: skip
