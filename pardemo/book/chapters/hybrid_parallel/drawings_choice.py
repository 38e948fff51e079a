"""How to choose a layout for a model and a cluster: the questions in their order, and the layout of each answer."""

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.flowchart import GAP, HIGH, WIDE, box, down, yes
from pardemo.draw.palette import RANKS

_QUESTIONS = (  # n: GPUs, Ψ: parameters; the answer where it is yes
    (("16Ψ bytes fit a GPU?",), ("copies",)),
    (("4Ψ + 12Ψ/n bytes fit?",), ("copies,", "ZeRO-1")),
    (("16Ψ/n bytes fit, and a GPU", "has T ≥ rate/link tokens?"), ("ZeRO-3",)),
)


def layout_choice() -> Drawing:
    """Three questions, each with the layout for a yes; after three noes, how to cut a replica of the model."""
    canvas = Canvas(640, 8 + 5 * (HIGH + GAP) + 24)
    y = 4.0
    for question, answer in _QUESTIONS:
        box(canvas, 8, y, WIDE, question)
        yes(canvas, y, answer)
        down(canvas, y, "no")
        y += HIGH + GAP
    box(canvas, 8, y, WIDE, ("cut the copy in two, where it", "costs less: twice t or twice p"), RANKS[3])
    down(canvas, y, "then")
    y += HIGH + GAP
    box(canvas, 8, y, WIDE, ("4Ψ/(t·p) + 12Ψ/n bytes fit?",))
    yes(canvas, y, ("copies of", "t · p GPUs"))
    x, back = 8 + WIDE / 2 + 60, y - GAP
    canvas.arrow([(x, y), (x, back)])
    canvas.text(x + 16, (y + back) / 2, "no", size=18, anchor="start")
    canvas.text(8, y + HIGH + 22, "n GPUs, Ψ parameters, T tokens of a GPU in a micro-batch", size=18, anchor="start")
    return Drawing(
        canvas,
        "Do 16 bytes a parameter fit a GPU: copies. Do 4, and 12 shared by all: copies with ZeRO-1. Do 16 shared by "
        "all, and are there enough tokens: ZeRO-3. Else each copy is cut in two again and again, into tensor-parallel "
        "ranks or into stages, whichever costs less, until it fits; the rest of the GPUs are copies, with ZeRO-1.",
    )
