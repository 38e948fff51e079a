"""A player for pages without sliders: a frame for each position of the layout's sliders."""

from collections.abc import Mapping
from typing import Any

from pardemo.draw import palette
from pardemo.draw.canvas import Canvas
from pardemo.draw.parts import legend
from pardemo.draw.player import Player
from pardemo.planner.layouts.job.job import Job
from pardemo.planner.layouts.job.layout import Layout
from pardemo.planner.layouts.price.memory import memory
from pardemo.planner.layouts.price.step import step

#: What a rank does in a step, and the planner's parts that are it.
DOES = {
    "computes": (
        palette.COMPUTED,
        ("layers as measured", "matrix multiplications", "attention", "memory bandwidth", "optimizer"),
    ),
    "talks in each layer": (
        palette.DONE["communication"],
        ("tensor-parallel traffic", "context-parallel traffic", "expert-parallel traffic"),
    ),
    "gradients, gathers, messages": (palette.RECEIVED, ("data-parallel traffic", "pipeline messages")),
    "waits": (palette.DONE["idle"], ("pipeline bubble", "launching kernels")),
}
_SHOWN = {**palette.KEPT, "logits": palette.SHADES["logits"]}
_LEFT, _WIDE, _MOST_S, _MOST_GB = 92, 440, 50, 100


def player(positions: Mapping[str, tuple[Job, Layout]]) -> Player:
    """``positions``: what was moved -> the job and the layout there; two bars each, seconds and GB."""
    frames = [_frame(moved, *chosen) for moved, chosen in positions.items()]
    return Player(frames, "where a step's time and a GPU's memory go, as the sliders move")


def _frame(moved: str, job: Job, layout: Layout) -> tuple[Canvas, str]:
    canvas = Canvas(640, 262)
    predicted, footprint = step(job, layout), memory(job, layout)
    canvas.text(8, 18, moved, "start", size=20, bold=True)
    spent = {name: sum(predicted.parts.get(part, 0.0) for part in of) for name, (_, of) in DOES.items()}
    colours = {name: colour for name, (colour, _) in DOES.items()}
    _bar(canvas, 44, "time", spent, colours, _MOST_S, f"{predicted.seconds:.0f} s")
    legend(canvas, 8, 104, dict(list(colours.items())[:2]), gap=18)
    legend(canvas, 8, 130, dict(list(colours.items())[2:]), gap=18)
    gigabytes = {line: value / 1e9 for line, value in footprint.lines.items() if line in _SHOWN}
    _bar(canvas, 156, "memory", gigabytes, _SHOWN, _MOST_GB, f"{footprint.peak_bytes / 1e9:.0f} GB")
    room = _LEFT + _WIDE * job.machine.gpu.memory_bytes / 1e9 / _MOST_GB
    canvas.line([(room, 146), (room, 204)], palette.VERDICTS["fails"], 3)
    legend(canvas, 8, 222, dict(list(_SHOWN.items())[:3]), gap=18)
    legend(canvas, 8, 248, dict(list(_SHOWN.items())[3:]) | {"the GPU has": palette.VERDICTS["fails"]}, gap=18)
    seconds_text = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in spent.items() if seconds >= 0.05)
    return (
        canvas,
        f"{moved}: {layout}. {predicted.seconds:.1f} s a step ({seconds_text}); {footprint.peak_bytes / 1e9:.0f} GB.",
    )


def _bar(
    canvas: Canvas, y: float, name: str, values: Mapping[str, Any], colours: Mapping[str, str], most: float, label: str
) -> None:  # fmt: skip
    canvas.text(_LEFT - 10, y + 18, name, "end")
    x, end = _LEFT, _LEFT + _WIDE
    for kind, value in values.items():
        wide = min(value * _WIDE / most, end - x)
        if wide > 0:
            canvas.box(x, y, wide, 36, colours[kind], thick=1)
        x += wide
    canvas.text(x + 8, y + 18, label + (" →" if sum(values.values()) > most else ""), "start", bold=True)
