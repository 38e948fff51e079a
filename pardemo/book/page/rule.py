"""The book's one rule for a first layout, drawn; each chapter marks the lines that it explains."""

from collections.abc import Collection, Mapping
from typing import Any

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.charts import bar_chart
from pardemo.draw.palette import KEPT, RANKS, ink_on
from pardemo.draw.style import Picture

WIDE, LINE = 640, 34
#: part -> (which layouts add it, how much it adds, as a share of the time of the matrix multiplications)
TERMS = {
    "recomputation": ("layers recomputed", "⅓"),
    "tensor parallel": ("TP: t ranks inside a node", "(t − 1) · F / (4.5 · h · B)"),
    "pipeline": ("PP: p stages wait", "(p − 1) / (m · v)"),
    "messages": ("PP: messages, B of one GPU", "⅔ · h · p · v · F / (Ψ · B)"),
    "ZeRO-3": ("ZeRO-3; HSDP in a node", "(κ − 1)/3 + (2κ − 2)/3"),
    "ZeRO-2": ("ZeRO-2", "(κ − 2)/3 + κ / (3m)"),
    "ZeRO-1": ("ZeRO-1", "(κ − 2)/(3m) + κ / (3m)"),
    "replicas": ("replicas; HSDP across", "(2κ − 2)/(3m)"),
}
#: part -> its label, colour and hatch in charts
PARTS = {
    "recomputation": ("recomputation", RANKS[3], ""),
    "tensor parallel": ("tensor parallel", RANKS[1], "//"),
    "pipeline": ("pipeline", RANKS[2], ".."),
    "data parallel": ("data parallel", RANKS[0], "xx"),
}


def rule(marked: Collection[str] = ()) -> Drawing:
    """The rule as three steps: what fits, what each layout adds, which layout is taken.

    Args:
        marked: parts of :data:`TERMS` whose lines stand out, since the chapter explains them.
    """
    canvas = Canvas(WIDE, 92 + LINE * (len(TERMS) + 1) + 124)
    _step(canvas, 4, 44, "1  Which layouts fit, with 8 % of the memory free?")
    canvas.arrow([(40, 48), (40, 74)])
    high = LINE * (len(TERMS) + 1) + 8
    canvas.box(8, 76, WIDE - 16, high, "none", border=KEPT["parameters"], thick=2)
    canvas.text(20, 76 + LINE / 2 + 4, "2  What does each add to its multiplications? κ = F / (B · T)", "start")
    for number, (name, (layouts, formula)) in enumerate(TERMS.items(), 1):
        y = 76 + LINE * number + LINE / 2 + 4
        if name in marked:
            canvas.box(14, y - LINE / 2 + 2, WIDE - 28, LINE - 4, RANKS[2], border="")
        ink = ink_on(RANKS[2]) if name in marked else "currentColor"
        canvas.text(34, y, layouts, "start", fill=ink)
        canvas.text(WIDE - 24, y, formula, "end", fill=ink)
    y = 76 + high
    canvas.arrow([(40, y), (40, y + 28)])
    lines = (
        "3  Take the one that adds least; of those within 3 % the one",
        "with the fewest kinds of cuts (TP, PP), then the fewest",
        "chunks, then the least sharding (replicas before ZeRO-1)",
    )
    canvas.box(8, y + 30, WIDE - 16, 82, RANKS[3], border="", thick=2)
    for number, text in enumerate(lines):
        canvas.text(44 if number else 20, y + 48 + 24 * number, text, "start", fill=ink_on(RANKS[3]))
    spoken = "; ".join(f"{layouts} {formula}" for layouts, formula in TERMS.values())
    return Drawing(
        canvas,
        "Of the layouts that fit with 8 % of the memory free, take the one that adds least to the time of its matrix "
        f"multiplications: {spoken}. A bracket below 0 hides and adds nothing. Of those within 3 % the one with the "
        "fewest kinds of cuts (tensor ranks, stages), then the fewest chunks, then the least sharding.",
    )


def _step(canvas: Canvas, y: float, high: float, text: str) -> None:
    canvas.box(8, y, WIDE - 16, high, "none", border=KEPT["parameters"], thick=2)
    canvas.text(20, y + high / 2, text, "start")


def what_each_adds(shares: Mapping[str, Mapping[str, float]], name: str, chosen: str = "", job: str = "") -> Picture:
    """Draws what each layout adds to the time of its matrix multiplications, in per cent, by what adds it.

    Args:
        shares: layout -> part -> share. name: of the picture's file. chosen: the layout that the rule takes.
        job: what is trained on what, in words.
    """
    layouts = {f"{layout} ◀" if layout == chosen else layout: by_part for layout, by_part in shares.items()}
    return bar_chart(
        name, f"{job or 'A job'}: what each layout adds to its multiplications' time: {{}}."
        + (f" The rule takes {chosen}." if chosen else ""),
        {"added to the time of the multiplications, %": added(layouts)}, title=job, across=True, stacked=True,
        text="{:.0f} %", room=1.2,
    )  # fmt: skip


def added(layouts: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Arguments of :func:`pardemo.draw.charts.bars`: what each layout adds, in per cent, by what adds it."""
    labels = {label: {name: by.get(part, 0.0) for name, by in layouts.items()} for part, (label, *_) in PARTS.items()}
    return {"series": labels, "per": 0.01, "fills": {label: tuple(look) for label, *look in PARTS.values()}}
